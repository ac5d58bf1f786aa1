"""Stops a run whose loss is NaN or infinite."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import NO_ROW, TrainingBatches


class NonFiniteLossError(RuntimeError):
    """The loss of a step was NaN or infinite. The last checkpoint is from before that step."""


class NonFinite:
    """Whether a loss was NaN or infinite, noted on the device so that nobody waits for it."""

    def __init__(self) -> None:
        self._flag: torch.Tensor | None = None

    def note(self, loss: torch.Tensor) -> None:
        """Note the loss of a micro-batch, a scalar."""
        flag = ~torch.isfinite(loss.detach())
        self._flag = flag if self._flag is None else self._flag | flag

    def take(self) -> torch.Tensor | None:
        """Whether one of the losses since the last call was: a bool scalar on the device, read by nobody yet."""
        flag, self._flag = self._flag, None
        return flag


class _FlagOnItsWay:
    """A flag that travels from the device to the host, over all ranks, while the next step runs."""

    def __init__(self, flag: torch.Tensor) -> None:
        flag = flag.to(torch.int32)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        self._arrived = torch.Event(flag.device) if flag.device.type != "cpu" else None
        if self._arrived is None:
            self._host = flag
        else:  # into pinned memory, because a copy to any other waits
            self._host = torch.empty_like(flag, device="cpu", pin_memory=True).copy_(flag, non_blocking=True)
            self._arrived.record()

    def read(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._host.item())


class StopOnNonFiniteLoss(TrainerCallback):
    """Reads each step's flag one step later, and at once before anything is saved or evaluated.

    Args:
        nonfinite: of this rank's micro-batches.
        batches: tells the rows of a step.
        place: tells where a training row stands (`file:line`), for the message.
    """

    def __init__(self, nonfinite: NonFinite, batches: TrainingBatches, place: Callable[[int], str]) -> None:
        self.nonfinite = nonfinite
        self.batches = batches
        self.place = place
        self._flags: deque[tuple[int, _FlagOnItsWay]] = deque()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        flag = self.nonfinite.take()
        if flag is not None:
            self._flags.append((state.global_step, _FlagOnItsWay(flag)))
        self._read(leave=0 if control.should_save or control.should_evaluate or control.should_training_stop else 1)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._read(leave=0)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._read(leave=0)

    def _read(self, leave: int) -> None:
        while len(self._flags) > leave:
            step, flag = self._flags.popleft()
            if flag.read():
                raise NonFiniteLossError(self._message(step))

    def _message(self, step: int) -> str:
        epoch, step_of_epoch = divmod(step - 1, self.batches.steps_per_epoch)
        micro_batches = self.batches.micro_batches(epoch, step_of_epoch)
        rows = [self.place(row) for micro_batch in micro_batches for row in micro_batch if row != NO_ROW]
        return (
            f"The loss of step {step} is NaN or infinite; training has stopped and nothing was saved since. Lower "
            f"--learning_rate, use bf16 in place of fp16, or look at the rows of that batch: {', '.join(rows)}."
        )
