"""Loads the best model when the training ends."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from indictune.train.exact_trainer import ExactTrainer


class LoadBest(TrainerCallback):
    """Commits the last checkpoint, then loads the best: the Trainer (5.23) would read the best before, and delete the
    last checkpoint before the model is saved.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: ExactTrainer) -> None:
        self.trainer = trainer

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.checkpoints.finish()
        load_best(self.trainer)


def load_best(trainer: ExactTrainer) -> None:
    """Load the best weights, where that is asked for."""
    trainer.load_best()
