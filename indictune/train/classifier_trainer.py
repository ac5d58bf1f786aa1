"""transformers' Trainer for classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase

from indictune.config.arguments import SentimentTrainingArguments
from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.data.load_rows import Rows
from indictune.distributed import sharding
from indictune.errors import UserError
from indictune.evaluation.console_tables import per_label_table, per_language_table
from indictune.evaluation.metrics import ClassificationMetrics, flatten_for_trainer, language_metric
from indictune.models.classifier import class_names, load_trained
from indictune.models.load import Model, runs_own_code
from indictune.models.unpadded import classify_unpadded, uncounted_token
from indictune.train.exact_trainer import Batch, ExactTrainer
from indictune.train.loss import ExactLoss, row_losses

_MAX_NAMES = 20


def check_metric(metric: str, validation: Rows | None) -> None:
    """Refuse to compare checkpoints by a language that no validation row has: the first evaluation would fail.

    Args:
        metric: `--metric_for_best_model`.
        validation: rows for the evaluations of a run, or None.

    Raises:
        UserError: it is the metric of such a language.
    """
    name = metric.removeprefix("eval_")
    if validation is None or not name.startswith(SentimentTrainingArguments.LANGUAGE_METRICS):
        return  # of a metric that is none, `check_values` tells
    there = [language_metric(language) for language in validation.languages()]
    if name not in there:
        more = f", or that of one of {len(there) - _MAX_NAMES} more" if len(there) > _MAX_NAMES else ""
        raise UserError(
            f"--metric_for_best_model {name}: no row of {validation.source} has that language; expected "
            f"{' or '.join(there[:_MAX_NAMES])}{more}."
        )


class IndicTrainer(ExactTrainer):
    """Trains a classifier of tweets.

    Args:
        model: a sequence classifier with `id2label`.
        args: with `gradient_accumulation_steps` already decided.
        train_dataset: columns `input_ids`, `labels`, `length`.
        eval_dataset: likewise, with `language`; or None.
        tokenizer: saved with the model.
        loss: of a micro-batch.
        padded: whether the rows of a training micro-batch are padded, as `models.unpadded.pads` says.
    """

    args: SentimentTrainingArguments

    def __init__(
        self,
        model: Model,
        args: SentimentTrainingArguments,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        loss: ExactLoss,
        padded: bool = True,
    ) -> None:
        super().__init__(model, args, train_dataset, eval_dataset, tokenizer, padded, compute_loss_func=loss)
        if not padded:
            classify_unpadded(model)
        self._uncounted_token = uncounted_token(model.config)
        self._class_names = class_names(model.config)
        # Others read a row's first token and count positions from it, or find its last one that is no padding.
        if model.config.model_type != "xlnet":
            tokenizer.padding_side = "right"  # in the saved model too
        self._padding = (tokenizer.pad_token_id, tokenizer.padding_side)

    def collator(self, evaluating: bool) -> Callable[[list[Row]], dict[str, Any]]:
        if not (self.padded or evaluating):
            return JoinRows(self._uncounted_token)
        return PadToLongest(*self._padding, with_row_numbers=evaluating)

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The predicted label and the loss."""
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return logits.argmax(-1), row_losses(logits, labels)

    def score(self, dataset: Dataset, results: Sequence[np.ndarray]) -> dict[str, Any]:
        predicted, losses = results
        scores: dict[str, Any] = ClassificationMetrics(self._class_names).compute(
            predictions=predicted,
            references=dataset["labels"][:],
            losses=losses,
            languages=dataset["language"][:],
        )
        return scores

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        return flatten_for_trainer(block)

    def tables(self, block: dict[str, Any]) -> str:
        return f"{per_language_table(block)}\n\n{per_label_table(block)}"

    def reload(self, folder: Path) -> nn.Module:
        trusts = runs_own_code(sharding.bare(self))
        return load_trained(folder, trusts, self.trusts_checkpoint, device_map="cpu")
