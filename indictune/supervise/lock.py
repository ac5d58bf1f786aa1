"""The lock of a run's folder: one run at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import TextIO

from indictune.errors import UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"
PATIENCE_S = 120.0  # a file server may keep the lock of a dead machine: NFS 4 for 90 s
_LOOK_EVERY_S = 1.0
_FLOCK = "hhqqi4x"  # `struct flock` of Linux on 64 bits: type, whence, start, length, process


def take(output_dir: Path, launch: str) -> TextIO:
    """Lock a run's folder for this process.

    The kernel releases the lock when the process ends. It is a record lock, which children do not inherit: processes
    that read rows ahead outlive a killed run for some seconds, and must not block the next run.

    Args:
        output_dir: of the run; it exists.
        launch: a name that its ranks share (`elastic.launch_name`).

    Returns:
        The locked file; closing it releases the lock.

    Raises:
        UserError: another process has it.
        OSError: the folder cannot be written to.
    """
    # No link, which may lead anywhere.
    descriptor = os.open(output_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = file.readline().strip()
        file.close()
        raise _refusal(output_dir, holder) from None
    except OSError as error:  # a file system without locks
        logger.debug("%s: %s", file.name, error)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n{launch}")
    file.flush()
    os.fsync(file.fileno())  # other machines see it at once
    return file


def wait_for_other_launch(output_dir: Path, launch: str, rank: int) -> None:
    """Wait while a process of another launch has a run's folder.

    Rank 0 waits only for another machine, which may be dead. The other ranks wait until rank 0 is refused and their
    launcher ends them.

    Raises:
        UserError: another launch still has it.
    """
    deadline, is_told = time.monotonic() + PATIENCE_S, rank != 0
    while (other := of_another_launch(output_dir, launch)) is not None:
        if time.monotonic() > deadline or (rank == 0 and other.endswith(f" on {socket.gethostname()}")):
            raise _refusal(output_dir, other)
        if not is_told:
            logger.warning("--output_dir %s: %s writes to it. Waiting for its end.", output_dir, other)
            is_told = True
        time.sleep(_LOOK_EVERY_S)


def of_another_launch(output_dir: Path, launch: str) -> str | None:
    """The process of another launch that has the folder; None without one. Looking takes no lock."""
    if sys.platform != "linux":
        return None
    try:
        with (output_dir / LOCK).open("r+", encoding="utf-8") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            holder, _, its_launch = file.read().partition("\n")
    except OSError:  # there is no lock, or the file system has no locks
        return None
    return None if kind == fcntl.F_UNLCK or its_launch == launch else holder


def _refusal(output_dir: Path, other: str) -> UserError:
    return UserError("run-folder-in-use", "--output_dir", output_dir, other=other)
