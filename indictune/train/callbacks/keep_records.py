"""Corrects what the Trainer keeps wrongly between steps."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Records(Protocol):
    """What is corrected, of a trainer."""

    _tr_loss: torch.Tensor

    def forget_uncompared_best(self) -> None: ...


class KeepRecords(TrainerCallback):
    """Forgets a NaN that was logged, and a best step whose weights are not kept.

    The Trainer (5.23) subtracts the summed loss from itself after it is logged, which keeps a NaN.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: Records) -> None:
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

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.forget_uncompared_best()
