"""NaN and infinite losses and gradients, noted on the device so that nobody waits for it."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

LOWER_RATE = (
    "begin again in another --output_dir with a lower --learning_rate (a run that goes on keeps the one it has)"
)


class NonFiniteLossError(RuntimeError):
    """A loss, gradient or weight was NaN or infinite. The last checkpoint is from before that."""


def is_below_one(scaler: torch.amp.GradScaler | None) -> bool | torch.Tensor:
    """Whether fp16's loss scaling has found no scale: a bool scalar, on the device where there is one.

    It begins at 2**16, halves the scale at each step whose gradient is NaN or infinite, and leaves the step out. Where
    that is so at a scale of 1 too, no smaller one helps: all steps would be left out.

    Args:
        scaler: of the run; None where it scales nothing.
    """
    if scaler is None or not scaler.is_enabled():
        return False
    scale = scaler._scale  # `get_scale` waits for the device (torch 2.13); None before the first loss
    return False if scale is None else scale < 1


class NonFinite:
    """Whether a loss or a gradient's norm was NaN or infinite since the last `take`.

    Attributes:
        loss: of the micro-batches since the last `take`, summed: a scalar on the device; None before the first.
        last: of the micro-batch that is computed, before it is noted; likewise.
    """

    def __init__(self) -> None:
        self._flag: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of a micro-batch, as its share of the step's."""
        self.note(loss)
        self.loss = loss if self.loss is None else self.loss + loss

    def note(self, number: torch.Tensor | float) -> None:
        """Note a scalar; of one that is spread over ranks, this rank's part."""
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
        """The flag: a bool scalar on the device, read by nobody yet; None where nothing was noted."""
        flag, self._flag, self.loss = self._flag, None, None
        return flag
