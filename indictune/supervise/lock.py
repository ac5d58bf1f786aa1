"""One run at a time in a folder."""

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
# For so long a file server may keep the lock of a machine that has died: NFS 4 for 90 s.
PATIENCE_S = 120.0
_LOOK_EVERY_S = 1.0
_FLOCK = "hhqqi4x"  # `struct flock` of Linux on 64 bits: type, whence, start, length, process


def held(output_dir: Path, launch: str) -> TextIO:
    """Take a run's folder for this process.

    The lock is the kernel's, and ends with the process, however that ends. It is a record lock, which no child takes
    over: processes that read rows ahead outlive a killed run for some seconds, and must not keep the next one out.

    Args:
        output_dir: of the run; it is there.
        launch: a name that its ranks share (`elastic.launch_name`).

    Returns:
        The file that is locked; to close it gives the folder back.

    Raises:
        UserError: another process has it.
        OSError: the folder cannot be written to.
    """
    # No link, which may lead anywhere.
    descriptor = os.open(output_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    me = f"process {os.getpid()} on {socket.gethostname()}"
    other = _other(file)
    if other is not None and not other.endswith(me.partition(" on ")[2]):
        logger.warning("--output_dir %s: %s writes to it; waiting for its end", output_dir, other)
        other = _other_after_a_while(file)
    if other is not None:
        file.close()
        raise _refusal(output_dir, other)
    file.seek(0)
    file.truncate()
    file.write(f"{me}\n{launch}")
    file.flush()
    os.fsync(file.fileno())  # a file server's clients keep what they write for half a minute
    return file


def wait_for_own_launch(output_dir: Path, launch: str) -> None:
    """Wait as long as a process of another launch has a run's folder. For the ranks that leave the lock to rank 0.

    Rank 0 is refused meanwhile, and their launcher ends them, or gets the folder.

    Raises:
        UserError: another launch still has it when rank 0 has given up.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (other := of_another_launch(output_dir, launch)) is not None:
        if time.monotonic() > deadline:
            raise _refusal(output_dir, other)
        time.sleep(_LOOK_EVERY_S)


def of_another_launch(output_dir: Path, launch: str) -> str | None:
    """Who has the folder, where that is a process of another launch. To look takes no lock: rank 0 may be about to."""
    found = _holder(output_dir)
    return None if found is None or found[1] == launch else found[0]


def _holder(output_dir: Path) -> tuple[str, str] | None:
    """Who has the folder, and the launch that it is of; None where nobody has it, or nobody can tell."""
    if sys.platform != "linux":
        return None
    try:
        with (output_dir / LOCK).open("r+", encoding="utf-8") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
            holder, _, its_launch = file.read().partition("\n")
    except OSError:  # there is none, it is not ours to write, or the file system has no locks
        return None
    return None if kind == fcntl.F_UNLCK else (holder, its_launch)


def _refusal(output_dir: Path, other: str) -> UserError:
    return UserError(
        f"--output_dir {output_dir}: another run writes to it ({other}). Wait for its end, or name another folder."
    )


def is_free(output_dir: Path) -> bool:
    """Whether no other process has the folder. Not for the process that has it: to look would give it back."""
    try:
        check_free(output_dir)
    except UserError:
        return False
    return True


def check_free(output_dir: Path) -> None:
    """Refuse a folder that another process has, as `is_free` sees it.

    Raises:
        UserError: it tells which.
    """
    try:
        with (output_dir / LOCK).open("r+", encoding="utf-8") as file:
            other = _other(file)
    except OSError:  # there is none, or it is not ours to write
        return
    if other is not None:
        raise _refusal(output_dir, other)


def _other(file: TextIO) -> str | None:
    """Lock a file; returns who has, where somebody else has."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        return file.readline().rstrip("\n") or "a process that does not tell its name"
    except OSError as error:  # a file system that has no locks
        logger.debug("%s: %s", file.name, error)
    return None


def _other_after_a_while(file: TextIO) -> str | None:
    deadline = time.monotonic() + PATIENCE_S
    while (other := _other(file)) is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return other
