"""A lock that lets one process make a folder of the cache while the others wait."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from indictune.progress import OWN_PROGRESS

logger = logging.getLogger(__name__)

_PATIENCE_S = 1.0


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
                held.enter_context(_lock(path, what))
                break
            except OSError as error:  # whoever writes next reports a disk that is full or read-only
                logger.info("%s: no lock in %s (%s)", what, path.parent, error)
        yield


def _lock(path: Path, what: str) -> AbstractContextManager[object]:
    """Take a lock, which the end of the block releases.

    Without file locks, filelock (4.2) falls back to a marker file. After a kill on another machine, all would wait for
    it; so the fallback is off.
    """
    lock = FileLock(path, mode=0o666, fallback_to_soft=False)
    try:
        return lock.acquire(timeout=_PATIENCE_S)
    except Timeout:
        logger.info("%s: waiting for another process, which prepares this", what)
        with OWN_PROGRESS.waiting(f"waiting for another process, which prepares {what.lower()}"):
            return lock.acquire()
