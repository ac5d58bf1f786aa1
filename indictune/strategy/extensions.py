"""Locks that a killed build of DeepSpeed's operators has left: torch waits for them without end and without a word."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from torch.utils.cpp_extension import get_default_build_root

from indictune.strategy.launch import Launch

logger = logging.getLogger("indictune")

SECONDS_OF_A_BUILD = 600  # cpu_adam takes one to two minutes
SECONDS_OF_A_LOOK = 2  # one that was taken since the look is younger
SECONDS_BETWEEN_LOOKS = 1.0

# File systems that no other machine has mounted.
_OF_ONE_MACHINE = frozenset({"apfs", "btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})


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
    told = set()
    while left := [lock for lock in _locks() if not _is_held(lock)]:
        for lock in left:
            remaining = _made_at(lock) + _seconds_to_keep(lock) - time.time()
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
    """How old a lock must be that nobody here holds: a look sees all holders where the disk is of this machine alone
    and the file of this user."""
    with suppress(FileNotFoundError):
        if lock.stat().st_uid == os.getuid() and _kind_of_disk(lock) in _OF_ONE_MACHINE:
            return SECONDS_OF_A_LOOK
    return SECONDS_OF_A_BUILD


def _kind_of_disk(path: Path) -> str:
    """The file system that it is on, as the kernel names it; empty where it is not known."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[above] for above in path.resolve().parents if above in mounts), "")


def _is_held(lock: Path) -> bool:
    """Whether a process of this user on this machine has the file open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                return True
    return False
