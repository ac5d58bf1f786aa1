"""Stop a run whose ranks no longer train the same model."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.distributed.divergence import DivergedError, check_copies
from indictune.distributed.sharding import has_own_optimizer, unwrapped
from indictune.training.task_trainer import TaskTrainer

FLAG = "--divergence_check_steps"


class CheckDivergence(TrainerCallback):
    """Compares the ranks' copies every so many steps, and before each save: a checkpoint holds copies that agree."""

    def __init__(self, trainer: TaskTrainer, every: int) -> None:
        self.trainer = trainer
        self.every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save or state.global_step % self.every == 0:
            self._check(state.global_step)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save:
            self._check(state.global_step)

    def _check(self, step: int) -> None:
        trainer = self.trainer
        assert trainer.optimizer is not None
        own: Any = trainer.optimizer
        optimizer = own.optimizer if has_own_optimizer(trainer) else None
        try:
            check_copies(step, FLAG, unwrapped(trainer), optimizer, trainer.launch)
        except DivergedError:
            trainer.checkpoints.finish()  # it was compared when it was begun
            raise
