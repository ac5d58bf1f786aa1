"""Locks that a killed build of DeepSpeed's operators has left: torch waits for them without end and without a word."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from glob import iglob
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

from indictune.config.plan import Launch

logger = logging.getLogger("indictune")

SECONDS_OF_A_BUILD = 600  # cpu_adam takes one to two minutes
SECONDS_OF_A_LOOK = 2  # one that was taken since the look is younger
SECONDS_BETWEEN_LOOKS = 1.0

# File systems that no other machine has mounted; of the last no other container either.
_OF_ONE_MACHINE = frozenset({"btrfs", "ext2", "ext3", "ext4", "tmpfs", "xfs", "zfs", "overlay"})
_ALL_PROCESSES = 0xEFFFFFFC  # Linux's number of the namespace in which all are seen, a container's too


def remove_dead_locks(launch: Launch, local_rank: int) -> None:
    """Wait until no lock is left that nobody on this machine holds, before DeepSpeed loads its operators.

    torch (2.13) makes a file `lock` while it compiles an operator, and keeps it open. A process that is killed
    meanwhile leaves it, and every later one waits in `FileBaton.wait` for it to go. Another machine with the same home
    may hold it too: there it is removed only once it is older than any build.

    Args:
        launch: only DeepSpeed's matter.
        local_rank: of this process on its machine; 0 removes, the others wait.
    """
    if not launch.family.startswith("zero"):
        return
    told, looked_at = set(), time.time()
    while left := [lock for lock in _locks() if not _is_held(lock)]:
        for lock in left:
            remaining = _made_at(lock) + _seconds_to_keep(lock) - looked_at
            if remaining > SECONDS_OF_A_LOOK and lock not in told:
                told.add(lock)
                logger.warning(
                    "%s: left by a build that was killed, or held by one on another machine. The run waits for it for "
                    "%d s; remove the file, if nobody builds there, to go on at once.",
                    *(lock, remaining),
                )
            if remaining <= 0 and local_rank == 0:
                lock.unlink(missing_ok=True)
        time.sleep(SECONDS_BETWEEN_LOOKS)
        looked_at = time.time()


def _locks() -> Iterator[Path]:
    """Of all operators: in a folder each under `TORCH_EXTENSIONS_DIR`, else under one for each build of torch."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return Path(given).glob("*/lock")
    return Path(get_default_build_root()).glob("*/*/lock")


def _made_at(lock: Path) -> float:
    """Seconds since the epoch; long ago where it has gone."""
    with suppress(FileNotFoundError):
        return lock.stat().st_mtime
    return 0.0


def _seconds_to_keep(lock: Path) -> float:
    """How old a lock must be that nobody here holds: a look sees all holders where the file is of this user, on a disk
    that no other machine has, and no container whose processes are not seen here."""
    with suppress(OSError):
        kind = _kind_of_disk(lock)
        sees_all = kind == "overlay" or Path("/proc/self/ns/pid").stat().st_ino == _ALL_PROCESSES
        if lock.stat().st_uid == os.getuid() and kind in _OF_ONE_MACHINE and sees_all:
            return SECONDS_OF_A_LOOK
    return SECONDS_OF_A_BUILD


def _kind_of_disk(path: Path) -> str:
    """The file system that it is on, as the kernel names it; empty where it is not known."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[above] for above in path.resolve().parents if above in mounts), "")


def _is_held(lock: Path) -> bool:
    """Whether a process of this user on this machine has the file open, by whatever name a container has for it."""
    with suppress(FileNotFoundError):
        held = lock.stat()
        for opened in iglob("/proc/[0-9]*/fd/*"):
            with suppress(OSError):  # another user's, or closed since
                if os.path.samestat(os.stat(opened), held):
                    return True
    return False
