"""The loss of one global batch, exact whatever its split over ranks and micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class ExactLoss:
    """Cross-entropy summed over the rows of the whole global batch, divided by their number.

    Each micro-batch gives its own rows' share, `sum of its row losses / rows of the global batch`; the shares of all
    ranks and micro-batches add up to the mean over the global batch, also where they hold different numbers of rows.
    The Trainer undoes the division by the world size that averages gradients over ranks.

    Class weights multiply each row's loss, and the divisor stays the number of rows (torch's own weighted mean would
    divide by the weights that happen to be in a micro-batch). Label smoothing is that of torch's cross-entropy, where
    each label's term has that label's weight.

    Args:
        class_weights: float [labels], or None for equal ones.
        label_smoothing: share of the target that is spread evenly over all labels, from 0 to 1.
    """

    def __init__(self, class_weights: torch.Tensor | None = None, label_smoothing: float = 0.0) -> None:
        self.class_weights = class_weights
        self.label_smoothing = label_smoothing

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This micro-batch's share of the loss, a scalar.

        Args:
            outputs: of the model, with `logits` [rows, labels].
            labels: int64 [rows]; rows labelled -100 count for nothing.
            num_items_in_batch: labelled rows of the global batch.
        """
        if num_items_in_batch is None:
            raise ValueError("The Trainer did not count the rows of the global batch (num_items_in_batch is None).")
        logits = outputs.logits.float()
        if self.class_weights is not None:
            self.class_weights = self.class_weights.to(logits.device)  # once: each copy makes the host wait for a GPU
        summed = functional.cross_entropy(
            logits, labels, weight=self.class_weights, label_smoothing=self.label_smoothing, reduction="none"
        ).sum()
        return summed / num_items_in_batch


def row_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Plain cross-entropy of each row, float32 [rows]: what evaluations report, without weights or smoothing."""
    return functional.cross_entropy(logits.float(), labels, reduction="none")
