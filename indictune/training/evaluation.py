"""Evaluate so that every row counts once, before training too, and let a trained language model answer samples."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.integrations.deepspeed import deepspeed_init
from transformers.trainer_utils import speed_metrics

from indictune.checkpoint.compatibility import validation_digest
from indictune.checkpoint.train_state import RandomStates
from indictune.data.batching import NO_ROW
from indictune.data.cache import build_once, kept_folder
from indictune.data.chat.chat_tokens import answer_ends, prompt_ids
from indictune.data.collation import in_order
from indictune.distributed import collectives
from indictune.errors import Problems
from indictune.evaluation.breakdown import WORST, WRITTEN, Breakdown, break_down, named_scores
from indictune.evaluation.scorers import written_answers
from indictune.evaluation.uncertainty import RESAMPLES
from indictune.files import SAMPLES, write_whole
from indictune.run import OWN_PROGRESS, Run
from indictune.tasks.kto import MarkedAnswers
from indictune.tasks.preferences import Preferences
from indictune.tasks.protocol import Samples
from indictune.training.task_trainer import TaskTrainer
from indictune.upstream import has_prepared_model

if TYPE_CHECKING:
    from indictune.evaluation.own_metrics import OwnScores

logger = logging.getLogger(__name__)


def write_samples(trainer: TaskTrainer, run: Run, samples: Samples | None) -> None:
    """Let the trained model answer conversations, and score what it writes to rows that it was not trained on.

    `samples.jsonl` gets a JSON object a row: `split`, `messages` (before the answer), `prompt` (the same as the model
    reads it), `reference`, `answer` and, of preferences, `answer_before`, by the model before training. The scores are
    in `trainer.written`. All ranks must call it: each may hold a part of the weights. A stop loses no training.
    """
    if samples is None:
        return
    tokenizer = cast(PreTrainedTokenizerBase, trainer.processing_class)
    trainer.asked_before = None  # was of the training, where a stop would lose a step
    tokens = answers_to(trainer, samples)
    answers = _texts(trainer, tokens)
    if samples.rows is not None:
        trainer.written = scores_of_samples(trainer, samples, answers)
    if run.rank != 0:
        return
    lines, at_start = [], None if trainer.answers_before is None else _texts(trainer, trainer.answers_before)
    for number, (messages, answer) in enumerate(zip(samples.chats, answers, strict=True)):
        prompt = tokenizer.decode(prompt_ids(messages, tokenizer, samples.template))
        *before, right = messages
        texts = {"split": samples.split, "messages": before, "prompt": prompt}
        texts |= {"reference": right["content"], "answer": answer}
        if at_start is not None:
            texts["answer_before"] = at_start[number]
        lines.append(json.dumps(texts, ensure_ascii=False) + "\n")
    write_whole(run.output_dir / SAMPLES, "".join(lines))
    if trainer.answers_before is not None:
        references = [tokenizer(chat[-1]["content"], add_special_tokens=False)["input_ids"] for chat in samples.chats]
        of_all = {"reference": references, "before": trainer.answers_before, "after": tokens}
        trainer.answer_lengths = {name: float(np.mean(list(map(len, each)))) for name, each in of_all.items()}


def scores_of_samples(trainer: TaskTrainer, samples: Samples, answers: list[str], draws: int = RESAMPLES) -> Breakdown:
    """The scores of written answers, for whom they are; `draws` as of `break_down`. All ranks must call it."""
    right, facts = [messages[-1]["content"] for messages in samples.chats], samples.facts()
    found = break_down("written_answers", facts, written_answers(answers, right), draws=draws)
    own = scores_by_metrics(trainer, (answers, right), facts.languages)
    return found if own is None else own.beside(found)


def scores_by_metrics(
    trainer: TaskTrainer, sides: tuple[list[Any], list[Any]] | None, languages: Sequence[str]
) -> OwnScores | None:
    """What `score_rows` gives, or raises, for `--metrics` on rank 0; None without any. All ranks must call it."""
    if sides is None or not trainer.args.metrics:
        return None
    from indictune.evaluation.own_metrics import score_rows

    problems, states, found = Problems(), RandomStates(), None
    if trainer.args.process_index == 0:
        OWN_PROGRESS.passed("computing --metrics")
        found = problems.attempt(score_rows, trainer.args.metrics, sides, languages)
        states.restore()
    found, problems = collectives.gather_from_all((found, problems))[0]
    if problems and trainer.state.global_step:
        kept = "What was trained is saved: --resume_from_checkpoint auto goes on from there."
        problems = Problems(replace(each, way_out=f"{each.cure} {kept}") for each in problems)
    problems.raise_any()
    return found


def answers_to(trainer: TaskTrainer, samples: Samples) -> list[list[int]]:
    """What the model answers, as tokens, in the order of the conversations. All ranks must call it."""
    tokenizer = cast(PreTrainedTokenizerBase, trainer.processing_class)
    ends = answer_ends(tokenizer, samples.template)
    prompts = (prompt_ids(messages, tokenizer, samples.template) for messages in samples.chats)
    return [greedy(trainer, prompt, samples.max_new_tokens, ends) for prompt in prompts]


def _texts(trainer: TaskTrainer, answers: list[list[int]]) -> list[str]:
    tokenizer = cast(PreTrainedTokenizerBase, trainer.processing_class)
    return [cast(str, tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]


def greedy(trainer: TaskTrainer, prompt: list[int], max_new_tokens: int, ends: Collection[int]) -> list[int]:
    """The likeliest continuation, token by token, up to one of `ends`.

    `generate` would call the model inside peft's, but only a call of the outer model gathers sharded weights. Every
    rank computes the same, and takes rank 0's token so that all stop together.
    """
    model, device = trainer.model_wrapped, trainer.args.device
    model.eval()
    answer: list[int] = []
    tokens, cache = torch.tensor([prompt], device=device), None
    with torch.no_grad(), trainer.compute_loss_context_manager():
        while len(answer) < max_new_tokens:
            OWN_PROGRESS.passed("writing samples")
            trainer.look_for_stop(f"{_stage(trainer, 'trained')} wrote samples; going on writes them")
            # Without a mask, the attention for joined rows would ignore a layer's sliding window.
            mask = torch.ones(1, len(prompt) + len(answer), dtype=torch.long, device=device)
            if trainer.parallelism.pipeline is None:
                output = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
                tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            else:  # a cache counts the tokens in the first layer, which other stages do not have
                inputs = {"input_ids": torch.tensor([prompt + answer], device=device), "attention_mask": mask}
                tokens = trainer.parallelism.compute(inputs, partial(_next_token, model, inputs)).to(device)
            OWN_PROGRESS.passed("computing a token of a sample")
            tokens = broadcast(tokens)
            if int(tokens) in ends:
                break
            answer.append(int(tokens))
    return answer


def _next_token(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return cast(Tensor, model(**inputs, use_cache=False).logits[:, -1:].argmax(-1))


def evaluate_rows(trainer: TaskTrainer, dataset: Dataset, prefix: str) -> dict[str, float]:
    """Score a dataset, log the flat metrics with a prefix, and keep the nested ones. All ranks must call it."""
    began = time.time()
    results, objective = measured_rows(trainer, dataset), trainer.objective
    if dataset is trainer.eval_dataset:
        objective.fit(dataset, results)
    detailed = objective.metrics(objective.breakdown(dataset, results))
    flat = objective.flatten(detailed)
    if trainer.args.metrics:
        own = scores_by_metrics(trainer, objective.compared(dataset, results), dataset["language"][:])
        trainer.own_scores = own
        if own is not None:
            own.add_to(detailed)
            flat |= own.overall
    trainer.detailed_metrics[prefix] = detailed
    trainer.measured = results if objective.keeps_scores else None
    asked = str(trainer.args.metric_for_best_model).removeprefix("eval_")
    if trainer.is_in_train and asked not in flat:
        flat |= _score_of_some(trainer, dataset, results, asked)
    metrics = {f"{prefix}_{name}": value for name, value in flat.items()}
    at_once = trainer.args.eval_batch_size * trainer.launch.data_size
    metrics |= speed_metrics(prefix, began, num_samples=len(dataset), num_steps=math.ceil(len(dataset) / at_once))  # type: ignore[no-untyped-call]
    trainer.log(metrics)
    if trainer.is_in_train:
        others = [name for name in flat if name != "loss"][:1]  # the main one
        names = ["loss", *(others if asked == "loss" else [asked])]
        listed = ", ".join(f"{name} {flat[name]:.4f}" for name in names)
        logger.info("step %d of %d: validation %s", trainer.state.global_step, trainer.state.max_steps, listed)
    handler = trainer.callback_handler
    trainer.control = handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    return metrics


def _score_of_some(
    trainer: TaskTrainer, dataset: Dataset, results: Sequence[np.ndarray], name: str
) -> dict[str, float]:
    """The score of a language, script, range of lengths or label, or of written answers, by its name."""
    found = trainer.objective.breakdown(dataset, results, trainer.validation_scripts)
    if trainer.samples is not None and (trainer.args.metrics or name.removeprefix(WORST).startswith(WRITTEN)):
        answers = _texts(trainer, answers_to(trainer, trainer.samples))
        found = replace(found, written=scores_of_samples(trainer, trainer.samples, answers, draws=0))
    return {each: score for each, score in named_scores(found).items() if each == name}


def measured_rows(trainer: TaskTrainer, dataset: Dataset) -> list[np.ndarray]:
    """What the task measures of each row, and knows of it, each [rows], in the dataset's order."""
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
    of_rows = in_order(row_numbers, results, len(dataset))
    return [*of_rows, *trainer.objective.known(dataset, of_rows)]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays [rows] or [rows, ...] of several batches. Shorter rows are filled with -100."""
    if parts[0].ndim == 2:
        widest = max(each.shape[1] for each in parts)
        fill = [((0, 0), (0, widest - each.shape[1])) for each in parts]
        parts = [np.pad(each, by, constant_values=-100) for each, by in zip(parts, fill, strict=True)]
    return np.concatenate(parts)


def measure_batch(trainer: TaskTrainer, model: nn.Module, batch: Any) -> tuple[torch.Tensor, ...] | None:
    """The row numbers of a batch [rows], and what the task measures of each row; None without the last layers."""
    trainer.look_for_stop(f"{_stage(trainer, 'finished')} was evaluated; going on evaluates it again")
    return _measured(trainer, model, trainer.on_device(batch))


def _stage(trainer: TaskTrainer, ended: str) -> str:
    """Which model a stop concerns. In training only that before it: at a later one the step is saved."""
    return "the model before training" if trainer.is_in_train else f"the {ended} model"


def _measured(trainer: TaskTrainer, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...] | None:
    OWN_PROGRESS.passed("evaluating a batch")
    row_numbers = inputs.pop("row_numbers")
    with torch.no_grad(), trainer.compute_loss_context_manager():
        measured = trainer.parallelism.measure(inputs, partial(trainer.objective.measure, model))
        return None if measured is None else (row_numbers, *measured)


def prepared_model(trainer: TaskTrainer) -> nn.Module:
    """The model. accelerate prepares it, if no training has done so."""
    assert trainer.model is not None
    if trainer.is_deepspeed_enabled and trainer.deepspeed is None:
        deepspeed_init(trainer, num_training_steps=0, inference=True)  # type: ignore[no-untyped-call]
    if has_prepared_model(trainer.accelerator):
        return trainer.model
    if trainer.is_deepspeed_enabled:
        trainer.model_wrapped = trainer.deepspeed = trainer.accelerator.prepare(trainer.model)
    else:
        trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    return trainer.model_wrapped


_REFERENCE = "log_probs.npy"


def look_at_start(trainer: TaskTrainer, objective: Preferences) -> None:
    """Give the objective the log-probabilities of all answers under the model before training, and write samples.

    Each row is measured once, by one rank. So no second model is held. A resumed run reads the same numbers again. All
    ranks must call it.
    """
    before = RandomStates()
    for dataset in (trainer.train_dataset, trainer.eval_dataset, trainer.test_dataset):
        if dataset is not None:
            objective.references[id(dataset)] = _log_probs(trainer, dataset, objective)
    reference = objective.references[id(trainer.train_dataset)]
    objective.reference = torch.from_numpy(reference).to(trainer.args.device)
    if trainer.samples is not None:
        trainer.answers_before = answers_to(trainer, trainer.samples)
    before.restore()  # a run that found the numbers in the cache draws the same ones


def measure_divergence(trainer: TaskTrainer, objective: MarkedAnswers, batches: Sequence[dict[str, Any]]) -> None:
    """Give the objective one number for the rows of a step, of all its micro-batches and ranks. All must call it."""
    model = prepared_model(trainer)
    model.eval()
    summed = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
    for batch in batches:
        measured = _measured(trainer, model, batch.pop("others"))
        if measured is not None:
            rows, log_probs, _ = measured
            ratios = (log_probs[:, 0] - objective.reference[rows, 1]).double()
            summed += torch.stack([(ratios * (rows != NO_ROW)).sum(), (rows != NO_ROW).sum()])
    if trainer.args.world_size > 1:
        torch.distributed.all_reduce(summed)
    objective.divergence = (summed[0] / summed[1].clamp(min=1)).clamp(min=0).float()


def _log_probs(trainer: TaskTrainer, dataset: Dataset, objective: Preferences) -> np.ndarray:
    """Of both answers of each pair, float32 [pairs, 2]."""
    kind, parts = objective.cached_as(validation_digest(dataset))
    folder = kept_folder(kind, parts)
    if not all(collectives.gather_from_all(folder is not None)):
        logger.info("Measuring the answers of %s rows by the model before training", f"{len(dataset):,}")
        log_probs = measured_rows(trainer, dataset)[0]
        build_once(kind, parts, "The reference", partial(_write, log_probs))
        return log_probs  # equal on all nodes, also where a disk has older numbers
    assert folder is not None
    found: np.ndarray = np.load(folder / _REFERENCE)
    return found


def _write(log_probs: np.ndarray, folder: Path) -> None:
    np.save(folder / _REFERENCE, log_probs)
