"""transformers' Trainer for tasks that bring a loss of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from indictune.config.arguments import IndicTrainingArguments
from indictune.distributed import sharding
from indictune.models.load import Model, runs_own_code
from indictune.models.unpadded import classify_unpadded
from indictune.tasks.objective import Batch, Collator, Objective
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
    objective: Objective

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

    def collator(self, evaluating: bool) -> Collator:
        return self.objective.collator(evaluating)

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """What the objective keeps of each row."""
        return self.objective.measure(model, inputs)

    def score(self, dataset: Dataset, results: Sequence[np.ndarray]) -> dict[str, Any]:
        return self.objective.score(dataset, results, is_validation=dataset is self.eval_dataset)

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        return self.objective.flatten(block)

    def tables(self, block: dict[str, Any]) -> str:
        return self.objective.tables(block)

    def fitted(self) -> dict[str, Any]:
        return self.objective.fitted()

    def reload(self, folder: Path) -> nn.Module:
        return self.objective.reload(folder, runs_own_code(sharding.bare(self)), self.trusts_checkpoint)
