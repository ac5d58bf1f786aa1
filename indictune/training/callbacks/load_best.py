"""Load the best model when the training ends."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

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
