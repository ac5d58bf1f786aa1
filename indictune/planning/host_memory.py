"""How much memory this machine has left, as its limits for this process say."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import psutil

# Limit and use of this process's control group, version 2 and 1.
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
COUNTS = Path("/proc/vmstat")


def free_and_capacity() -> tuple[int, int]:
    """Bytes that are free and bytes that there are, by the tightest of machine, control group and `ulimit -v`."""
    machine = psutil.virtual_memory()
    found = [(machine.available, machine.total)]
    for limit, use in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # `max` is no number
            most = int(limit.read_text(encoding="ascii"))
            found.append((max(0, most - int(use.read_text(encoding="ascii"))), most))
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        found.append((max(0, most - psutil.Process().memory_info().vms), most))
    return min(found)


def killed_processes() -> int:
    """How many processes Linux has killed for lack of memory since it started, those of control groups included."""
    with suppress(OSError):
        for line in COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
