"""Evaluate so that every row counts once, at any number of processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers.integrations.deepspeed import deepspeed_init
from transformers.trainer_utils import speed_metrics

from indictune.data.collation import in_order
from indictune.distributed import collectives
from indictune.evaluation.score_names import WORST, WRITTEN, named_scores
from indictune.progress import OWN_PROGRESS
from indictune.training.samples import answers_to, scores_of_samples
from indictune.training.task_trainer import TaskTrainer
from indictune.training.upstream import has_prepared_model

logger = logging.getLogger(__name__)


def evaluate_rows(trainer: TaskTrainer, dataset: Dataset, prefix: str) -> dict[str, float]:
    """Score a dataset, log the flat metrics with a prefix, and keep the nested ones. All ranks must call it.

    Raises:
        Stopped: a rank was asked to stop.
    """
    began = time.time()
    results, objective = measured_rows(trainer, dataset), trainer.objective
    if dataset is trainer.eval_dataset:
        objective.fit(dataset, results)
    detailed = objective.metrics(objective.breakdown(dataset, results))
    trainer.detailed_metrics[prefix] = detailed
    trainer.measured = results if objective.keeps_scores else None
    flat = objective.flatten(detailed)
    if trainer.is_in_train and (asked := asked_metric(trainer)) not in flat:
        flat |= _score_of_some(trainer, dataset, results, asked)
    metrics = {f"{prefix}_{name}": value for name, value in flat.items()}
    at_once = trainer.args.eval_batch_size * trainer.launch.data_size
    metrics |= speed_metrics(prefix, began, num_samples=len(dataset), num_steps=math.ceil(len(dataset) / at_once))  # type: ignore[no-untyped-call]
    trainer.log(metrics)
    if trainer.is_in_train:
        logger.info(_in_one_line(trainer, flat))
    handler = trainer.callback_handler
    trainer.control = handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    return metrics


def asked_metric(trainer: TaskTrainer) -> str:
    """The metric that compares checkpoints, as an objective names it."""
    return str(trainer.args.metric_for_best_model).removeprefix("eval_")


def _score_of_some(
    trainer: TaskTrainer, dataset: Dataset, results: Sequence[np.ndarray], name: str
) -> dict[str, float]:
    """The score of a language, script, range of lengths or label, or of written answers, by its name."""
    found = trainer.objective.breakdown(dataset, results, trainer.validation_scripts)
    if name.removeprefix(WORST).startswith(WRITTEN) and trainer.samples is not None:
        answers = answers_to(trainer, trainer.samples)
        found = replace(found, written=scores_of_samples(trainer.samples, answers, draws=0))
    return {each: score for each, score in named_scores(found).items() if each == name}


def _in_one_line(trainer: TaskTrainer, metrics: dict[str, float]) -> str:
    """The loss, and the metric that compares checkpoints: if that is the loss too, the first other one.

    Args:
        trainer: in training.
        metrics: of its validation rows, without a prefix, the main ones first.
    """
    asked = asked_metric(trainer)
    names = ["loss", *([asked] if asked != "loss" else [name for name in metrics if name != "loss"][:1])]
    listed = ", ".join(f"{name} {metrics[name]:.4f}" for name in names)
    return f"step {trainer.state.global_step} of {trainer.state.max_steps}: validation {listed}"


def measured_rows(trainer: TaskTrainer, dataset: Dataset) -> list[np.ndarray]:
    """What the task measures of each row, each [rows], in the dataset's order."""
    model = prepared_model(trainer)
    model.eval()
    loader, handler, args = trainer.evaluation_loader(dataset), trainer.callback_handler, trainer.args
    handler.eval_dataloader = loader
    trainer.asked_before = None
    kept: list[tuple[torch.Tensor, ...]] = []
    for batch in loader:
        measured = measure_batch(trainer, model, batch)
        kept += [] if measured is None else [measured]
        trainer.control = handler.on_prediction_step(args, trainer.state, trainer.control)
    of_rank = [joined([each.cpu().numpy() for each in column]) for column in zip(*kept, strict=True)]
    mine = of_rank if trainer.launch.measures_rows else None  # others have measured the same rows
    of_all = [each for each in collectives.gather_from_all(mine) if each is not None]
    row_numbers, *results = [joined(column) for column in zip(*of_all, strict=True)]
    return in_order(row_numbers, results, len(dataset))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays [rows] or [rows, ...] of several batches. Shorter rows are filled with -100."""
    if parts[0].ndim == 2:
        widest = max(each.shape[1] for each in parts)
        fill = [((0, 0), (0, widest - each.shape[1])) for each in parts]
        parts = [np.pad(each, by, constant_values=-100) for each, by in zip(parts, fill, strict=True)]
    return np.concatenate(parts)


def measure_batch(trainer: TaskTrainer, model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...] | None:
    """The row numbers of a batch [rows], and what the task measures of each row; None without the last layers."""
    OWN_PROGRESS.passed("evaluating a batch")
    trainer.look_for_stop("the finished model was evaluated; going on evaluates it again")
    inputs = trainer.on_device(batch)
    row_numbers = inputs.pop("row_numbers")
    with torch.no_grad(), trainer.compute_loss_context_manager():
        measured = trainer.parallelism.measure(inputs, partial(trainer.objective.measure, model))
        return None if measured is None else (row_numbers, *measured)


def prepared_model(trainer: TaskTrainer) -> nn.Module:
    """The model. accelerate prepares it, if no training has done so."""
    assert trainer.model is not None
    accelerator = trainer.accelerator
    if trainer.is_deepspeed_enabled and trainer.deepspeed is None:
        deepspeed_init(trainer, num_training_steps=0, inference=True)  # type: ignore[no-untyped-call]
    if has_prepared_model(accelerator):
        return trainer.model
    if not trainer.is_deepspeed_enabled:
        trainer.model_wrapped = accelerator.prepare_model(trainer.model, evaluation_mode=True)
        return trainer.model_wrapped
    trainer.model_wrapped = trainer.deepspeed = accelerator.prepare(trainer.model)
    return trainer.model_wrapped
