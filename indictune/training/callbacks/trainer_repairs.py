"""Shuffle each epoch anew, and correct what the Trainer records wrongly between steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import TrainingBatches
from indictune.training.task_trainer import TaskTrainer


class KeepRecords(TrainerCallback):
    """Forgets a NaN that was logged, and a best step whose weights are not kept.

    The Trainer (5.23) subtracts the summed loss from itself after it is logged, which keeps a NaN.
    """

    def __init__(self, trainer: TaskTrainer) -> None:
        self.trainer = trainer

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            self.trainer._tr_loss.nan_to_num_(0.0, 0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.forget_uncompared_best()

    on_train_end = on_step_begin


class EpochShuffle(TrainerCallback):
    """Tells the batches which epoch begins.

    The Trainer (5.23) does not tell a batch sampler that has no sampler inside: every epoch would repeat the first
    one's order.
    """

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.batches.set_epoch(state.global_step // self.batches.steps_per_epoch)
