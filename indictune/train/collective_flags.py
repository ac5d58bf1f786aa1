"""Flags that all ranks learn of together, without waiting for the device."""

from __future__ import annotations

import torch


class FlagsOnTheirWay:
    """Flags that travel from the device to the host, over all ranks, while the next step or batch runs.

    Args:
        flags: of this rank, known to the host or scalars on the device.
        device: on which this rank computes.
    """

    def __init__(self, *flags: bool | torch.Tensor, device: torch.device) -> None:
        # `torch.full` hands its number to a kernel; `torch.tensor` would copy it, and wait for the copy.
        known = [each if isinstance(each, torch.Tensor) else torch.full((), each, device=device) for each in flags]
        here = torch.stack(known).int()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(here, op=torch.distributed.ReduceOp.MAX)
        self._arrived = torch.Event(here.device) if here.device.type != "cpu" else None
        if self._arrived is None:
            self._host = here
        else:  # into pinned memory, because a copy to any other waits
            self._host = torch.empty_like(here, device="cpu", pin_memory=True).copy_(here, non_blocking=True)
            self._arrived.record()

    def read(self) -> list[bool]:
        """Whether any rank has set each flag."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [bool(flag) for flag in self._host.tolist()]
