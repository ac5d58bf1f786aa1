"""transformers' Trainer for tasks that bring a loss of their own."""

from __future__ import annotations

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.config.arguments import IndicTrainingArguments
from indictune.models.load import Model
from indictune.models.unpadded import classify_unpadded
from indictune.tasks.objective import Objective
from indictune.train.exact_trainer import ExactTrainer


class IndicTrainer(ExactTrainer):
    """Trains a model towards an objective.

    Args:
        model: with a head for the task.
        args: with `gradient_accumulation_steps` already decided.
        train_dataset: columns `input_ids`, `labels`, `length`.
        eval_dataset: likewise, with `language`; or None.
        tokenizer: saved with the model.
        objective: loss, collation and metrics.
        padded: whether the rows of a training micro-batch are padded, as `Task.pads` says.
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
