"""Losses of one global batch, exact for every split over ranks and micro-batches.

Each micro-batch gives its share: `sum of its losses / labels of the global batch`. The shares of all ranks and
micro-batches add up to the mean over the global batch, also where they hold different numbers of rows. The Trainer
undoes the division by the world size that averages gradients over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from indictune.data.collation import IGNORED_LABEL


class SharedLoss(ABC):
    """A loss that is summed over a micro-batch and divided by the labels of the global batch.

    Attributes:
        of_windows: whether the logits are those of windows. A row's are averaged: it begins at its label and continues
            at each `IGNORED_LABEL`.
    """

    of_windows = False

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        """This micro-batch's share of the loss, a scalar.

        `num_items_in_batch` is the number of labels of the global batch, without `IGNORED_LABEL`.
        """
        if num_items_in_batch is None:
            raise ValueError("The Trainer did not count the labels of the global batch (num_items_in_batch is None).")
        logits = outputs.logits.float()
        return self.total(mean_at_windows(logits, labels) if self.of_windows else logits, labels) / num_items_in_batch

    @abstractmethod
    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of all losses, a scalar that depends on every logit; `logits` are float32 [rows, ...]."""


class ExactLoss(SharedLoss):
    """Cross-entropy of rows, or of tokens.

    Class weights multiply each loss. The divisor stays the number of labels: torch's weighted mean would divide by the
    weights in a micro-batch. Label smoothing is torch's, where each label's term has that label's weight.

    Args:
        class_weights: float [labels], or None for equal ones.
        label_smoothing: share of the target that is spread over all labels, from 0 to 1.
    """

    def __init__(self, class_weights: Tensor | None = None, label_smoothing: float = 0.0) -> None:
        self.class_weights = class_weights
        self.label_smoothing = label_smoothing

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of `logits` [rows, classes] or [rows, tokens, classes] and int64 `labels` [rows] or [rows, tokens]."""
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(logits.device)  # once, because the host waits for each copy
        losses = functional.cross_entropy(
            *(logits.flatten(0, -2), labels.flatten()),
            weight=self.class_weights,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        return losses.sum()

    @staticmethod
    def each(logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row in evaluations, float32 [rows]: without weights or smoothing."""
        return functional.cross_entropy(logits.float(), labels, reduction="none")


class RegressionLoss(SharedLoss):
    """Squared error of rows, or with `kind="huber"` the Huber error, which grows linearly above 1."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of `logits` [rows, 1] and float32 `labels` [rows]."""
        return (self.each(logits, labels) * (labels != IGNORED_LABEL)).sum()

    def each(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The error of each row, float32 [rows]."""
        error = functional.huber_loss if self.kind == "huber" else functional.mse_loss
        return error(logits[:, 0].float(), labels.float(), reduction="none")


class SoftLabelLoss(SharedLoss):
    """Kullback-Leibler divergence of a teacher's distribution and the model's at a temperature, times its square.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), section 2: the square keeps the
    size of the gradients as the temperature changes.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of `logits` and the teacher's, `labels`, [rows, labels] each. The Trainer counts all labels of a row."""
        teacher, model = ((each / self.temperature).log_softmax(-1) for each in (labels.float(), logits))
        of_rows = functional.kl_div(model, teacher, reduction="none", log_target=True).sum(-1)
        return (of_rows * (labels[:, 0] != IGNORED_LABEL)).sum() * self.temperature**2 * labels.shape[1]


class MultiLabelLoss(SharedLoss):
    """Binary cross-entropy of every label of every row, as torch's `binary_cross_entropy_with_logits` averages it."""

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of `logits` [rows, labels] and 0 or 1 `labels` [rows, labels]; a row that is not counted may have fewer."""
        counted = labels[:, 0] != IGNORED_LABEL
        if not counted.any():
            return logits.sum() * 0
        return functional.binary_cross_entropy_with_logits(logits[counted], labels[counted].float(), reduction="sum")

    @staticmethod
    def each(logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of each row over the labels, float32 [rows]; 0 of a row that is not counted."""
        losses = functional.binary_cross_entropy_with_logits(
            logits.float(), labels.clamp(min=0).float(), reduction="none"
        )
        return losses.mean(-1) * (labels[:, 0] != IGNORED_LABEL)


def mean_at_windows(logits: Tensor, labels: Tensor) -> Tensor:
    """At each window, the mean logits of its row; float32 [windows, classes] and labels [windows, ...].

    No row is counted on the host, which would wait for the device.
    """
    begins = (labels if labels.ndim == 1 else labels[:, 0]) != IGNORED_LABEL
    row = begins.cumsum(0)
    together = (row[:, None] == row).to(logits.dtype)
    return (together[:, :, None] * logits).sum(1) / together.sum(1, keepdim=True)


def mean_of_windows(logits: Tensor, windows: Tensor) -> Tensor:
    """The mean logits of each row, float32 [rows, classes], from those of its windows, whose numbers are [rows]."""
    return torch.segment_reduce(logits.float(), "mean", lengths=windows, axis=0)


def read_texts(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits [rows, ...] and the labels of the texts of a batch; the logits of a row's windows are averaged."""
    labels, windows = inputs.pop("labels"), inputs.pop("windows", None)
    logits: Tensor = model(**inputs).logits
    return (logits if windows is None else mean_of_windows(logits, windows)), labels
