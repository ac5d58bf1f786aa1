"""Add the callbacks of a run to its trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from indictune.checkpoint.resume import ResumePoint
from indictune.config.flag_table import PARITY_TRACE
from indictune.config.plan import AnyPlan
from indictune.progress import OWN_PROGRESS
from indictune.run import Run
from indictune.training.callbacks.step_flags import CheckDivergence, StepFlags
from indictune.training.callbacks.throughput import TrainLog
from indictune.training.exact_trainer import ExactTrainer


class LoadBest(TrainerCallback):
    """Commits the last checkpoint, then loads the best one.

    The Trainer (5.23) would load the best before that, and delete the last checkpoint before the model is saved.
    """

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer = trainer

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.checkpoints.end()
        self.trainer.load_best()


class ReportProgress(TrainerCallback):
    """Records which step has ended, and that this rank still moves."""

    def _passed(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        OWN_PROGRESS.step = state.global_step
        OWN_PROGRESS.passed("ending a step, a micro-batch or a checkpoint")

    on_step_end = on_substep_end = on_prediction_step = on_save = _passed


def watch(trainer: ExactTrainer, plan: AnyPlan, run: Run, point: ResumePoint) -> None:
    """Add the callbacks that the run asks for. Code of the others is not imported."""
    trainer.add_callback(TrainLog(plan.output_dir / "train_log.jsonl", trainer.throughput))
    trainer.add_callback(StepFlags(trainer))
    if every := trainer.args.divergence_check_steps:
        if trainer.args.world_size > 1:
            trainer.add_callback(CheckDivergence(trainer, every))
        else:
            run.warn([f"Ignoring --divergence_check_steps {every}: one process has nothing to compare with."])
    if trainer.args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(trainer.args.early_stopping_patience))
    trainer.add_callback(ReportProgress())
    trainer.remove_callback(PrinterCallback)  # `TrainLog` writes what is logged
    trainer.add_callback(LoadBest(trainer))
    if trainer.args.push_to_hub and trainer.args.hub_strategy == "every_save":
        from indictune.hub.publish import destination_of
        from indictune.training.callbacks.push_saves import PushSaves

        trainer.add_callback(PushSaves(plan.output_dir, destination_of(plan.output_dir, trainer.args)))
    if point.checkpoint is not None:
        from indictune.training.callbacks.restore_progress import RestoreProgress

        trainer.add_callback(RestoreProgress(trainer, point))
    if trace := os.environ.get(PARITY_TRACE):
        from indictune.training.callbacks.parity_trace import ParityTrace

        trainer.add_callback(ParityTrace(trainer, Path(trace)))
    if trainer.args.profile_steps:
        from indictune.training.callbacks.profile_steps import ProfileSteps

        trainer.add_callback(ProfileSteps(trainer.args.profile_steps, run))
