"""Finish a run: its trained model is saved, scored row by row and compared with a baseline."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

from indictune.checkpoint import save
from indictune.checkpoint.store import UNFINISHED_MODEL
from indictune.config.recipe import configuration_of
from indictune.credentials import without_tokens
from indictune.data.cache import write_through
from indictune.distributed import collectives, devices, sharding
from indictune.files import TEST_FILE, write_json
from indictune.hub import publish
from indictune.hub.card import write_card
from indictune.models.atomic_folder import match_config_mode
from indictune.report.report_page import write_report
from indictune.run import Run
from indictune.stop_signals import Stopped
from indictune.tasks.protocol import TestTokens, Tokens
from indictune.training.evaluation import prepared_model, write_samples
from indictune.training.exact_trainer import ExactTrainer
from indictune.training.scored_rows import BLOCK_OF_SPLIT, Findings, add_baseline, data_facts
from indictune.training.verify import verify_saved
from indictune.versions import versions_of_steps

logger = logging.getLogger(__name__)


def save_model(trainer: ExactTrainer, run: Run) -> list[str]:
    """Save the trained model in `--output_dir`, whole or not at all. All ranks must call it.

    It is written to a folder there, given to nodes with separate disks, read again, and then moved into place. Ranks
    that write files get the names of the saved ones.

    Raises:
        SavedModelError: it is not the trained one.
        SaveError: the disk does not take it.
        NonFiniteLossError: a weight is NaN or infinite.
        Stopped: a rank was asked to stop. A resumed run need not train again.
    """
    trainer.check_weights()
    trainer.look_for_stop("the trained model was to be saved; a resumed run saves it", at_once=True)
    unfinished = run.output_dir / UNFINISHED_MODEL
    needed_bytes = partial(sharding.whole_bytes, sharding.unwrapped(trainer))
    with save.reporting(run.output_dir, "the model", unfinished, needed_bytes):
        trainer.save_model(str(unfinished), _internal_call=True)  # pushed once, by `finish_run`, when all is written
        if run.rank == 0:
            trainer.objective.finish_tokenizer(unfinished, configuration_of(run.output_dir)["max_length"])
        collectives.give_files(unfinished, run.rank == 0, trainer.args, trainer.disks_group)
    try:
        verify_saved(trainer, unfinished)
    except Stopped:
        if trainer.args.should_save:
            shutil.rmtree(unfinished)
        raise
    if not trainer.args.should_save:
        return []
    match_config_mode(unfinished)
    files = sorted(path.name for path in unfinished.iterdir())
    put_in_place(unfinished, run.output_dir)
    return files


def put_in_place(folder: Path, target: Path) -> None:
    """Sync a folder's files to the disk and move them to another, weights last. Remove the folder."""
    for path in sorted(folder.iterdir(), key=lambda path: ".safetensors" in path.name):
        there = target / path.name
        if path.is_dir():
            shutil.rmtree(there, ignore_errors=True)
        else:
            write_through(path)
        path.replace(there)
    write_through(target)
    folder.rmdir()


def finish_run(trainer: ExactTrainer, run: Run, result: TrainOutput, tokens: Tokens, saved_files: list[str]) -> None:
    """Evaluate the saved model, write `metrics.json` last, and push if asked to. All ranks must call it.

    The test rows are evaluated only here. `result` comes from `train`, and `saved_files` from `save_model`.
    """
    state = trainer.state
    if state.global_step < state.max_steps:
        logger.info("Stopped early, after step %d of %d", state.global_step, state.max_steps)
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        best = Path(state.best_model_checkpoint).name
        logger.info("The model is that of %s, the best by %s", best, trainer.args.metric_for_best_model)
    training = trainer.throughput.totals(result.metrics["train_runtime"])
    if seconds := trainer.checkpoints.snapshot_seconds:
        share = sum(seconds) / result.metrics["train_runtime"]
        training["snapshots"] = {"median_s": statistics.median(seconds), "share_of_runtime": share}
    metrics = run_metrics(trainer) | {
        "global_batch_size": trainer.args.global_batch_size,
        "train": training | {"peak_memory_bytes": peak_memory_bytes(trainer)},
        "data": data_facts(tokens, sharding.unwrapped(trainer).config, run.recipe.values),
        "versions": versions_of_steps(),
    }
    findings = Findings(run)
    with findings.writing():
        for split, dataset in (("validation", trainer.eval_dataset), ("test", tokens.test)):
            if dataset is not None:
                metrics[BLOCK_OF_SPLIT[split]] = findings.evaluate(trainer, dataset, split, tokens.origins.get(split))
    if trainer.answer_lengths is not None:
        metrics["answer_lengths"] = trainer.answer_lengths
    if trainer.args.should_save and (fitted := trainer.objective.fitted()):
        config = run.output_dir / "config.json"
        write_json(config, json.loads(config.read_text(encoding="utf-8")) | fitted)
    assert run.plan is not None
    has_labels = any(each.kind == "single_label" for each in findings.breakdowns.values())  # one each, on rank 0
    values = run.plan.configuration
    if values.get("baseline") and has_labels and values.get("soft_label_column") is None:  # of a task with the flags
        split = "validation" if tokens.test is None else "test"
        scored = trainer.eval_dataset if tokens.test is None else tokens.test
        add_baseline(run, tokens, split, scored, findings.results[0], trainer.objective, state.max_steps)
    if trainer.args.push_to_hub:
        publish.begin_push(trainer, saved_files)
    write_metrics(trainer, run, metrics)
    if trainer.args.should_save:
        write_card(run.output_dir, trainer.hub_model_id if trainer.args.push_to_hub else None)
        if trainer.args.report:
            report_run(run)
    if trainer.args.push_to_hub and run.rank == 0:
        publish.publish_run(run.output_dir, trainer.args)


def report_run(run: Run) -> None:
    """Write `report.html`. If that fails it is a warning: the model is there."""
    try:
        path = write_report([run.output_dir])
    except Exception as error:
        reason = without_tokens(f"{type(error).__name__}: {error}")
        run.warn([f"No report is written ({reason}). Try again: indictune report {run.output_dir}"])
    else:
        run.show(f"Open {path} in a browser: curves, scores, mistakes.")


def write_metrics(trainer: ExactTrainer, run: Run, metrics: dict[str, Any]) -> None:
    """Write `metrics.json`, which marks a finished run, on every disk."""
    if trainer.args.should_save:
        write_json(run.output_dir / "metrics.json", metrics)
        write_through(run.output_dir / "metrics.json")
        write_through(run.output_dir)
    if run.rank == 0:
        run.show(f"\nWritten to {run.output_dir}")


def evaluate_file(trainer: ExactTrainer, run: Run, test: TestTokens, test_file: str) -> None:
    """Evaluate a file's rows and write `metrics.json`, which names the file. All ranks must call it.

    Raises:
        UserError: the model computes numbers that are not finite.
    """
    findings = Findings(run, str(run.recipe.values["model"]))
    if test.samples is not None:
        prepared_model(trainer)
        write_samples(trainer, run, test.samples)
    with findings.writing():
        tested = findings.evaluate(trainer, test.rows, "test", test.origins)
    path = os.path.abspath(test_file)
    if trainer.args.should_save:
        write_json(run.output_dir / TEST_FILE, {"test_file": path})
    write_metrics(trainer, run, run_metrics(trainer) | {"test_file": os.path.basename(path), "test": tested})


def run_metrics(trainer: ExactTrainer) -> dict[str, Any]:
    """The first block of `metrics.json`: how the run was distributed. All ranks must call it."""
    where = {"devices": devices.device_counts(trainer.args), "dtype": devices.dtype_of(trainer.args)}
    return {"strategy": trainer.launch.strategy, "world_size": trainer.args.world_size, **where}


def peak_memory_bytes(trainer: ExactTrainer) -> int:
    """The most memory that any rank has used: GPU memory, or the process's memory without a GPU."""
    device = trainer.args.device
    if device.type == "cpu":
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    else:
        mine = torch.accelerator.max_memory_allocated(device)
    return int(trainer.accelerator.gather(torch.tensor([mine], device=device)).max())
