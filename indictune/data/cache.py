"""Build a folder of files once; every process and later run reads it."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from indictune.cache_folders import cache_folder, kept_in
from indictune.file_locks import locked
from indictune.progress import OWN_PROGRESS
from indictune.versions import versions_of

logger = logging.getLogger(__name__)

_DIGESTS = "digests.json"
# Other versions of these may read, clean or tokenise differently.
_READERS = ("datasets", "ftfy", "lingua-language-detector", "pyarrow")
_TOKENIZERS = ("sentencepiece", "tokenizers", "transformers", "trl")
# Errors of file systems that cannot fsync a folder.
_NOT_FOR_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_STALE_S = 24 * 3600.0


def build_once(kind: str, parts: Sequence[object], what: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills on the first call with these parts; later calls and other processes read it.

    One process fills it under a file lock; the others wait. The kernel releases the lock (flock) of a killed process.
    The lock only saves work. The folder is filled under another name, fsynced and renamed: it is complete or absent.
    If the file system has no locks, or the lock's file is another user's, one process a node fills a folder, and the
    first one is kept.

    Args:
        kind: of folder; its name begins with it.
        parts: everything that the content depends on, in a form that json can write. Our code and the versions of
            libraries are added.
        what: the content, for messages, such as "The rows".
        make: writes files to the folder it is given.

    Raises:
        UserError: from `make`, or the cache folder cannot be written.
    """
    content = json.dumps([_code_digest(), versions_of(_READERS + _TOKENIZERS), unicodedata.unidata_version, *parts])
    digest = hashlib.sha256(content.encode()).hexdigest()[:24]
    folder = cache_folder() / "prepared" / f"{kind}-{digest}"
    OWN_PROGRESS.passed(f"preparing {what.lower()}")
    with kept_in(folder.parent, what):
        if _is_complete(folder):
            logger.debug("%s: prepared before, in %s", what, folder)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            with locked(folder, what):
                if not _is_complete(folder):
                    _build(folder, make)
    OWN_PROGRESS.passed(f"having prepared {what.lower()}")
    return folder


def file_digest(path: str | Path) -> str:
    """Digest of the bytes of a file. An unreadable file has a digest too: reading it later reports the problem."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error}"


def write_through(path: Path) -> None:
    """Fsync a file or folder, if the file system supports it.

    Raises:
        OSError: fsync failed; the error names the path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FOR_FOLDERS or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


@functools.cache
def _code_digest() -> str:
    """Digest of the code that reads, cleans and tokenises. It replaces a version number."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py")))
    ).hexdigest()


def _build(folder: Path, make: Callable[[Path], None]) -> None:
    """Fill a temporary folder, and rename it to `folder`."""
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(unfinished)
        digests = {path.name: file_digest(path) for path in unfinished.iterdir()}
        (unfinished / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            write_through(path)
        with suppress(OSError):  # a file system may refuse modes
            unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if _is_complete(folder):  # another process was faster, without a lock
                return
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            unfinished.rename(folder)
        write_through(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _is_complete(folder: Path) -> bool:
    """Whether the folder exists and all its files have their digests: the disk may have changed a row.

    Reading the files takes a second for 1.4 GB, and brings them to memory, where they are needed next.
    """
    try:
        digests = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return all(file_digest(folder / name) == digest for name, digest in digests.items())


def _remove_stale(parent: Path) -> None:
    """Remove unfinished folders of killed processes: those older than a day."""
    for unfinished in parent.glob(".*-*-*"):
        with suppress(OSError):  # another process removed it, or it is another user's
            if time.time() - unfinished.stat().st_mtime > _STALE_S and unfinished.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)


_EVERY_S = 5.0


def with_progress(batches: Iterable[pa.RecordBatch], what: str, total: int | None = None) -> Iterator[pa.RecordBatch]:
    """Pass record batches on, and log every five seconds how many rows went by, of `total` if known."""
    logged, rows, of_total = time.monotonic(), 0, f" of {total:,}" if total else ""
    for batch in batches:
        yield batch
        OWN_PROGRESS.moved()
        rows += batch.num_rows
        if time.monotonic() - logged > _EVERY_S:
            logger.info("%s: %s%s rows", what, f"{rows:,}", of_total)
            logged = time.monotonic()
