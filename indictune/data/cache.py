"""What is made once, and then read by every process and every later run."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from indictune.cache_folders import cache_folder, kept_in
from indictune.progress import HERE
from indictune.versions import versions_of

logger = logging.getLogger(__name__)

_DIGESTS = "digests.json"
# Other versions of these may read, clean or tokenise otherwise.
_PACKAGES = ("datasets", "pyarrow", "sentencepiece", "tokenizers", "transformers", "trl")
# What file systems say that write folders through by themselves, or never.
_NOT_FOR_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_PATIENCE_S = 1.0
_HEAD_START_S = 0.3
_LEFT_OVER_S = 24 * 3600.0


def made_once(kind: str, parts: Sequence[object], what: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, on the first call with these parts; later calls and other processes read it.

    One process makes it, behind a lock on a file; the others wait. The lock is the kernel's (flock) and ends with its
    process, so a killed one blocks nobody. It only saves work: the folder is filled under another name, written
    through to the disk and renamed, so that it is whole or not there also where a file system has no such locks, or
    the lock's file is another user's; each process then makes its own, and the first to be ready is read.

    Args:
        kind: of folder; its name begins with it.
        parts: all that the content depends on, beside the code of this package and the versions of libraries; what
            json can write.
        what: the content, for messages, such as "The rows".
        make: writes files to the folder it is given.

    Raises:
        UserError: from `make`, or the cache's folder cannot be written.
    """
    folder = cache_folder() / "prepared" / f"{kind}-{_fingerprint(parts)}"
    HERE.passed(f"preparing {what.lower()}")
    with kept_in(folder.parent, what):
        if _is_whole(folder):
            logger.info("%s: prepared before, in %s", what, folder)
        else:
            _make_alone(folder, what, make)
    HERE.passed(f"having prepared {what.lower()}")
    return folder


def _make_alone(folder: Path, what: str, make: Callable[[Path], None]) -> None:
    """Make it, or wait for the process that does."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_HEAD_START_S)  # the first process of a machine shows its progress on the console
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder.parent)
    with _alone(folder, what):
        if not _is_whole(folder):
            _make(folder, make)


@contextmanager
def _alone(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a folder, where there can be one."""
    lock = _lock(folder)
    try:
        try:
            lock.acquire(timeout=_PATIENCE_S)
        except Timeout:
            logger.info("%s: another process prepares them; waiting for it", what)
            with HERE.waiting(f"waiting for another process, which prepares {what.lower()}"):
                lock.acquire()
    except OSError as error:  # of a disk that is full or cannot be written to, `_make` tells
        logger.info("%s: each process prepares its own, for there is no lock (%s)", what, error)
    try:
        yield
    finally:
        lock.release()


def _digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digest(path: str) -> str:
    """Of the bytes of a file. A file that cannot be read has a digest too: reading it tells what is wrong."""
    try:
        return _digest(path)
    except OSError as error:
        return f"unreadable: {error}"


@functools.cache
def _code_digest() -> str:
    """Of the code that reads, cleans and tokenises: no number has to be raised when it changes."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _fingerprint(parts: Sequence[object]) -> str:
    content = json.dumps([_code_digest(), versions_of(_PACKAGES), unicodedata.unidata_version, *parts])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a folder beside `folder`, and rename it."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(unfinished)
        digests = {path.name: _digest(path) for path in unfinished.iterdir()}
        (unfinished / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            write_through(path)
        with suppress(OSError):  # a file system may refuse modes
            unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if _is_whole(folder):  # another process was quicker, where no lock keeps it out
                return
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            unfinished.rename(folder)
        write_through(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Whether the folder is there, with all files as they were written: nothing would tell of a row that the disk has
    changed. Reading them takes a second for 1.4 GB, and brings them to memory, where they are needed next."""
    try:
        digests = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
        return all(_digest(folder / name) == digest for name, digest in digests.items())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left: unfinished folders of yesterday whose lock nobody holds.

    A lock alone says too little where another machine's locks are not seen.
    """
    for unfinished in parent.glob(".*-*-*"):
        lock = _lock(parent / unfinished.name[1:].rpartition("-")[0])
        with suppress(OSError):  # held, gone, another user's, or there are no locks
            if time.time() - unfinished.stat().st_mtime > _LEFT_OVER_S:
                with lock.acquire(blocking=False):
                    shutil.rmtree(unfinished, ignore_errors=True)


def _lock(folder: Path) -> FileLock:
    """Which all users of a shared cache can take, and none where there are no such locks: filelock (4.2) would leave
    a mark in its place, and for that of a process which was killed on another machine all would wait."""
    return FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o666, fallback_to_soft=False)


def write_through(path: Path) -> None:
    """Let a file, or a folder's list of names, reach the disk, as far as the file system does so.

    Raises:
        OSError: it does not; the error names the path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
