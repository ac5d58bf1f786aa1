"""Steps whose loss or gradient is NaN or infinite: found on the device, recorded, left out or the end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from indictune.data.batching import NO_ROW, TrainingBatches
from indictune.distributed import collectives
from indictune.distributed.strategy import leaves_bad_steps_out
from indictune.errors import problem
from indictune.files import Record
from indictune.upstream import loss_scale


class NonFiniteLossError(RuntimeError):
    """A loss, gradient or weight is NaN or infinite. The last checkpoint is from before that."""


def is_below_one(scaler: torch.amp.GradScaler | None) -> bool | torch.Tensor:
    """Whether fp16's loss scaling has found no scale: a bool scalar, on the device where there is one.

    The scaler halves the scale at each step whose gradient is NaN or infinite, and skips the step. If a scale of 1 is
    too large, a smaller one does not help: every step would be skipped.
    """
    if scaler is None or not scaler.is_enabled():
        return False
    scale = loss_scale(scaler)
    return False if scale is None else scale < 1


class NonFinite:
    """Whether a loss or a gradient's norm was NaN or infinite since the last `take`.

    Attributes:
        loss: summed over the micro-batches since the last `take`: a scalar on the device; None before the first.
    """

    loss: torch.Tensor | None = None
    _flag: torch.Tensor | None = None

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


class CollectiveFlags:
    """Flags of this rank, known to the host or scalars on its device, combined over all ranks.

    They are copied to the host while the next step or batch runs.
    """

    def __init__(self, *flags: bool | torch.Tensor, device: torch.device) -> None:
        # `torch.full` hands its number to a kernel; `torch.tensor` would copy it, and wait for the copy.
        known = [each if isinstance(each, torch.Tensor) else torch.full((), each, device=device) for each in flags]
        combined = torch.stack(known).int()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(combined, op=torch.distributed.ReduceOp.MAX)
        self._copied: torch.Event | None = None
        self._on_host = combined
        if combined.device.type != "cpu":  # into pinned memory, because a copy to any other waits
            pinned = torch.empty_like(combined, device="cpu", pin_memory=True)
            self._on_host = pinned.copy_(combined, non_blocking=True)
            self._copied = torch.Event(combined.device)
            self._copied.record()

    def read(self) -> list[bool]:
        """Whether any rank has set each flag."""
        if self._copied is not None:
            self._copied.synchronize()
        return [bool(flag) for flag in self._on_host.tolist()]


FILE = "nonfinite.jsonl"
_ROWS_IN_MESSAGE = 5  # the record has all rows


@dataclass
class BadSteps:
    """Bad steps with their rows.

    Attributes:
        batches: give the rows of a step.
        row_location: of a training row: `file:line`.
        record: `nonfinite.jsonl`; None on ranks that write none.
        strategy: of the run, in the names of `accelerate_configs/`.
        count: of the steps that were left out, earlier starts of the run included.
    """

    batches: TrainingBatches
    row_location: Callable[[int], str]
    record: Record | None
    strategy: str
    count: int = 0

    def note(self, step: int, action: str, loss: float | None) -> str:
        """Record a bad step and what is done about it: `stop`, `skip` or `rollback`. Returns its first rows."""
        self.count += 1
        epoch, step_of_epoch = divmod(step - 1, self.batches.steps_per_epoch)
        micro_batches = self.batches.micro_batches(epoch, step_of_epoch)
        rows = [row for micro_batch in micro_batches for row in micro_batch if row != NO_ROW]
        places = [self.row_location(row) for row in rows]
        if self.record is not None:
            self.record.append({"step": step, "action": action, "loss": loss, "rows": rows, "places": places})
        others = len(places) - _ROWS_IN_MESSAGE
        more = f" and {others} more ({FILE} lists them)" if others > 0 else ""
        return ", ".join(places[:_ROWS_IN_MESSAGE]) + more

    def stop(self, code: str, step: int, loss: float | None, **details: Any) -> NonFiniteLossError:
        """The error, by its code in `errors.toml`, that ends the run at a step, whose rows it records.

        `loss` is the mean over all ranks, or None if it is not to blame.
        """
        rows, policies = self.note(step, "stop", loss), " or ".join(leaves_bad_steps_out(self.strategy))
        details |= {"step": step, "loss": loss, "rows": rows, "policies": policies}
        return NonFiniteLossError(str(problem(code, "--on_nonfinite", **details)))


def mean_over_ranks(loss: torch.Tensor | None) -> float:
    """The mean of a scalar over all ranks, where None counts as 0. All ranks must call it."""
    losses = collectives.gather_from_all(0.0 if loss is None else loss.item())
    return sum(losses) / len(losses)
