"""The trainer of tasks whose objective has a loss."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import SINGLE, Launch
from indictune.models.load import Model
from indictune.models.unpadded import classify_unpadded
from indictune.progress import LAST_BEFORE_A_WAIT, OWN_PROGRESS
from indictune.tasks.objective import Objective
from indictune.training.exact_trainer import ExactTrainer


class IndicTrainer(ExactTrainer):
    """Trains a model towards an objective.

    Args:
        objective: loss, collation and metrics. The other arguments are those of `ExactTrainer`.
    """

    args: IndicTrainingArguments

    def __init__(
        self,
        model: Model,
        args: IndicTrainingArguments,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        objective: Objective,
        padded: bool = True,
        launch: Launch = SINGLE,
    ) -> None:
        self.objective = objective
        loss = objective.loss

        def recorded_loss(*args: Any, **settings: Any) -> Any:
            OWN_PROGRESS.passed(LAST_BEFORE_A_WAIT)
            return None if loss is None else loss(*args, **settings)

        super().__init__(
            model, args, train_dataset, eval_dataset, tokenizer, padded, launch, compute_loss_func=recorded_loss
        )
        if not padded:
            classify_unpadded(model)
