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
        loss: of a micro-batch; None if the trainer has its own.
        keeps_scores: whether `measure` keeps all that `predictions` and `breakdown` need.
    """

    loss: SharedLoss | None = None
    keeps_scores: bool = False

    @abstractmethod
    def collator(self, evaluating: bool) -> Collator:
        """Makes a micro-batch of rows. For evaluation it adds `row_numbers`, int64 [rows]."""

    @abstractmethod
    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """What an evaluation keeps of each row of a micro-batch, each [rows] or [rows, ...]."""

    @abstractmethod
    def score(self, dataset: Dataset, results: Sequence[np.ndarray], is_validation: bool) -> dict[str, Any]:
        """The block of `metrics.json` of an evaluation.

        Args:
            results: of `measure`, in the dataset's order.
            is_validation: whether the rows may fit something, such as a threshold.
        """

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        """What the model makes of each row, for `predictions.jsonl`; arguments as of `score`. By default nothing."""
        return iter(())

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None
    ) -> Breakdown | None:
        """Scores for whom, for `evaluation.json`, after `score` of the same rows; None for a task without them.

        Args:
            results: of `measure`, in the dataset's order; without `keeps_scores`, nothing says how sure the model is.
            scripts: of each row, as of `scripts_of`; None if unknown.
        """
        return None

    @abstractmethod
    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        """The numbers of a block that the Trainer logs and compares checkpoints by."""

    @abstractmethod
    def tables(self, block: dict[str, Any]) -> str:
        """A block as tables for the console."""

    @abstractmethod
    def load(self, folder: Path, trusts_code: bool, trusts_checkpoint: bool, device_map: str | None = None) -> Model:
        """The saved model; a `device_map` of "cpu" keeps it there."""

    def finish_tokenizer(self, folder: Path, max_length: int) -> None:  # noqa: B027, most tasks have nothing to do
        """Prepare the tokenizer saved in a folder for programs without this package."""

    def fitted(self) -> dict[str, Any]:
        """Entries for the `config.json` of the saved model, fitted on the validation rows."""
        return {}
