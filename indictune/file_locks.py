"""Locks between processes, by files: one process makes a folder of the cache, and one run writes to a folder.

The kernel releases a lock when its process ends, however that is. Forked children do not keep it (filelock 4.2 closes
it in them): processes that read rows ahead outlive a killed run for some seconds, and must not block the next one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock, Timeout

from indictune.errors import UserError
from indictune.run import OWN_PROGRESS

logger = logging.getLogger(__name__)

RUN_LOCK = ".lock"
PATIENCE_S = 120.0  # a file server may keep the lock of a dead machine: NFS 4 for 90 s
_SOON_S = 1.0  # in which whoever only looks at a lock has released it


def lock_file(
    path: Path, timeout_s: float = _SOON_S, mode: int = 0o644, is_of_process: bool = True
) -> AbstractContextManager[object]:
    """Take a lock, which the end of the block, or of this process, releases.

    Without file locks, filelock (4.2) falls back to a marker file. After a kill on another machine, all would wait for
    it; so the fallback is off.

    Args:
        path: of the file. A link is not followed.
        timeout_s: to wait for it; -1 for ever.
        mode: of a file that is made.
        is_of_process: whether this process may take it again; else another thread of it waits too.

    Raises:
        Timeout: another one has it.
        OSError: the file system has no locks, or the file cannot be written.
    """
    lock = FileLock(path, mode=mode, fallback_to_soft=False, is_singleton=is_of_process, thread_local=False)
    return lock.acquire(timeout=timeout_s, poll_interval=0.01)


def lock_if_possible(path: Path) -> AbstractContextManager[object]:
    """As `lock_file`, and nothing on a file system without locks.

    Raises:
        Timeout: another process has it.
    """
    try:
        return lock_file(path)
    except Timeout:
        raise
    except OSError as error:  # whoever writes next reports a disk that is full or read-only
        logger.debug("%s: %s", path, error)
        return nullcontext()


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a folder. If its file system has no locks, one of this machine: one process a node makes it.

    Args:
        folder: need not exist; the one around it must.
        what: the content, for messages, such as "The rows".
    """
    name = hashlib.sha256(f"{os.getuid()} {folder}".encode()).hexdigest()[:24]
    of_all, of_node = folder.with_name(f".{folder.name}.lock"), Path(tempfile.gettempdir(), f"indictune-{name}.lock")
    with ExitStack() as held:
        for path in (of_all, of_node):
            try:
                held.enter_context(_lock_patiently(path, what))
                break
            except OSError as error:  # whoever writes next reports a disk that is full or read-only
                logger.info("%s: no lock in %s (%s)", what, path.parent, error)
        yield


def _lock_patiently(path: Path, what: str) -> AbstractContextManager[object]:
    try:
        return lock_file(path, _SOON_S, 0o666, is_of_process=False)
    except Timeout:
        logger.info("%s: waiting for another process, which prepares this", what)
        with OWN_PROGRESS.waiting(f"waiting for another process, which prepares {what.lower()}"):
            return lock_file(path, -1, 0o666, is_of_process=False)


def lock_run_folder(output_dir: Path, launch: str) -> AbstractContextManager[object]:
    """Lock a run's folder for this process, and write into the lock whose it is.

    Args:
        output_dir: of the run; it exists.
        launch: a name that its ranks share (`elastic.launch_name`).

    Raises:
        UserError: another process has it.
        OSError: the folder cannot be written to.
    """
    path = output_dir / RUN_LOCK
    try:
        held = lock_if_possible(path)
    except Timeout:
        raise _refusal(output_dir, _holder_and_launch(path)[0]) from None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n{launch}")
        file.flush()
        os.fsync(file.fileno())  # other machines see it at once
    return held


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


def of_another_launch(output_dir: Path, launch: str) -> str | None:
    """The process of another launch that has the folder; None without one. Takes up to a second to see it."""
    path = output_dir / RUN_LOCK
    try:
        if _holder_and_launch(path)[1] != launch:
            with lock_file(path):
                pass
    except Timeout:
        holder, its_launch = _holder_and_launch(path)
        return None if its_launch == launch else holder
    except OSError:  # there is no lock, or the file system has no locks
        pass
    return None


def _holder_and_launch(path: Path) -> tuple[str, str]:
    holder, _, launch = path.read_text(encoding="utf-8").partition("\n")
    return holder, launch


def _refusal(output_dir: Path, other: str) -> UserError:
    return UserError("run-folder-in-use", "--output_dir", output_dir, other=other)
