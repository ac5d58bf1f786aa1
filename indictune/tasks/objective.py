"""What a trainer minimises and an evaluation measures: the part of a task that sees batches and logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from indictune.data.collation import Row
from indictune.evaluation.breakdown import Breakdown, RowFacts
from indictune.evaluation.score_names import block_of, metrics_tables
from indictune.models.load import Model
from indictune.tasks.loss import SharedLoss

if TYPE_CHECKING:
    from datasets import Dataset

Batch = dict[str, torch.Tensor]
Collator = Callable[[list[Row]], dict[str, Any]]


def row_facts(dataset: Dataset, scripts: Sequence[str] | None) -> RowFacts:
    """Of whom the rows of an evaluation are."""
    return RowFacts(dataset["language"][:], scripts, np.asarray(dataset["length"][:]))


class Objective(ABC):
    """How a model of one task is trained and scored.

    Attributes:
        METRICS: scores of all rows and of each language, in `metrics.json` and in tables.
        loss: of a micro-batch; None if the trainer has its own.
        keeps_scores: whether `measure` keeps all that `predictions` and `breakdown` need.
    """

    METRICS: tuple[str, ...] = ()
    loss: SharedLoss | None = None
    keeps_scores: bool = False

    @abstractmethod
    def collator(self, evaluating: bool) -> Collator:
        """Makes a micro-batch of rows. For evaluation it adds `row_numbers`, int64 [rows]."""

    @abstractmethod
    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """What an evaluation keeps of each row of a micro-batch, each [rows] or [rows, ...]."""

    def fit(self, dataset: Dataset, results: Sequence[np.ndarray]) -> None:  # noqa: B027, most tasks fit nothing
        """Fit what the validation rows decide, such as a threshold, before they are scored; see `breakdown`."""

    @abstractmethod
    def breakdown(
        self,
        dataset: Dataset,
        results: Sequence[np.ndarray],
        scripts: Sequence[str] | None = None,
        draws: int = 0,
    ) -> Breakdown:
        """The scores of an evaluation, which all others are taken from.

        Args:
            results: of `measure`, in the dataset's order.
            scripts: of each row, as of `scripts_of`; None if unknown.
            draws: of the rows, for the intervals; 0 for none.
        """

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        """What the model makes of each row, for `predictions.jsonl`. By default nothing."""
        return iter(())

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        """The block of `metrics.json` of an evaluation."""
        return block_of(found, lambda group: {name: group.scores[name].value for name in self.METRICS})

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        """The numbers of a block that the Trainer logs and compares checkpoints by."""
        return {name: block[name] for name in ("loss", *self.METRICS)}

    def tables(self, block: dict[str, Any]) -> str:
        """A block as tables for the console."""
        return metrics_tables(block, self.METRICS)

    @abstractmethod
    def load(self, folder: Path, trusts_code: bool, trusts_checkpoint: bool, device_map: str | None = None) -> Model:
        """The saved model; a `device_map` of "cpu" keeps it there."""

    def finish_tokenizer(self, folder: Path, max_length: int) -> None:  # noqa: B027, most tasks have nothing to do
        """Prepare the tokenizer saved in a folder for programs without this package."""

    def fitted(self) -> dict[str, Any]:
        """Entries for the `config.json` of the saved model, fitted on the validation rows."""
        return {}
