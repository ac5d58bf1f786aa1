"""The trainer of tasks whose objective has a loss."""

from __future__ import annotations

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.config.arguments import IndicTrainingArguments
from indictune.models.load import Model
from indictune.models.unpadded import classify_unpadded
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
    ) -> None:
        self.objective = objective
        super().__init__(model, args, train_dataset, eval_dataset, tokenizer, padded, compute_loss_func=objective.loss)
        if not padded:
            classify_unpadded(model)
