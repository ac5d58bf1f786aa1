"""NaN and infinite losses and gradients, noted on the device so that nothing waits for it."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor


class NonFiniteLossError(RuntimeError):
    """A loss, gradient or weight is NaN or infinite. The last checkpoint is from before that."""


def is_below_one(scaler: torch.amp.GradScaler | None) -> bool | torch.Tensor:
    """Whether fp16's loss scaling has found no scale: a bool scalar, on the device where there is one.

    The scaler halves the scale at each step whose gradient is NaN or infinite, and skips the step. If a scale of 1 is
    too large, a smaller one does not help: every step would be skipped.
    """
    if scaler is None or not scaler.is_enabled():
        return False
    scale = scaler._scale  # `get_scale` waits for the device (torch 2.13); None before the first loss
    return False if scale is None else scale < 1


class NonFinite:
    """Whether a loss or a gradient's norm was NaN or infinite since the last `take`.

    Attributes:
        loss: summed over the micro-batches since the last `take`: a scalar on the device; None before the first.
    """

    def __init__(self) -> None:
        self._flag: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's share of the step's loss."""
        self.note(loss)
        self.loss = loss if self.loss is None else self.loss + loss

    def note(self, number: torch.Tensor | float) -> None:
        """Note a scalar. Of a scalar that is spread over ranks, this rank's part counts."""
        if isinstance(number, DTensor):
            number = number.to_local()
        if isinstance(number, torch.Tensor):
            flag = ~torch.isfinite(number.detach())
        elif math.isfinite(number):
            return  # without a tensor, which would wait for the device
        else:
            flag = torch.tensor(True)
        self._flag = flag if self._flag is None else self._flag | flag.to(self._flag.device)

    def take(self) -> torch.Tensor | None:
        """The flag, not yet read: a bool scalar on the device; None where nothing was noted. Begins a new step."""
        flag, self._flag, self.loss = self._flag, None, None
        return flag
