"""Flags that all ranks learn together, without waiting for the device."""

from __future__ import annotations

import torch


class CollectiveFlags:
    """Flags combined over all ranks, and copied from the device to the host while the next step or batch runs.

    Args:
        flags: of this rank, known to the host or scalars on the device.
        device: that this rank computes on.
    """

    def __init__(self, *flags: bool | torch.Tensor, device: torch.device) -> None:
        # `torch.full` hands its number to a kernel; `torch.tensor` would copy it, and wait for the copy.
        known = [each if isinstance(each, torch.Tensor) else torch.full((), each, device=device) for each in flags]
        combined = torch.stack(known).int()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(combined, op=torch.distributed.ReduceOp.MAX)
        self._copied = torch.Event(combined.device) if combined.device.type != "cpu" else None
        if self._copied is None:
            self._on_host = combined
        else:  # into pinned memory, because a copy to any other waits
            self._on_host = torch.empty_like(combined, device="cpu", pin_memory=True).copy_(
                combined, non_blocking=True
            )
            self._copied.record()

    def read(self) -> list[bool]:
        """Whether any rank has set each flag."""
        if self._copied is not None:
            self._copied.synchronize()
        return [bool(flag) for flag in self._on_host.tolist()]
