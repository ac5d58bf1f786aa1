"""The size of `/dev/shm`, through which NCCL and the workers of data loaders send."""

from __future__ import annotations

import shutil
from pathlib import Path

from indictune.distributed.doctor.lines import Line
from indictune.distributed.machine_failures import SHARED_MEMORY

_SMALL, _LEAST = 1 << 30, 16 << 20  # bytes; Docker gives 64 MB, and NCCL takes some for each pair of ranks
_CURE = "docker run --shm-size 8g, or --ipc=host. Without it: --dataloader_num_workers 0."


def shared_memory_line() -> Line:
    """Whether this node has enough of it."""
    if not Path(SHARED_MEMORY).is_dir():
        return Line(SHARED_MEMORY, "ok", "this system has none, and needs none")
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    if usage.free < _LEAST:
        return Line(SHARED_MEMORY, "fail", found, f"Remove stale files there. {_CURE}")
    return Line(SHARED_MEMORY, "warn", found, _CURE) if usage.total < _SMALL else Line(SHARED_MEMORY, "ok", found)
