"""Rows of a split and other files, built once on disk and mapped into memory by every process and later run."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
import unicodedata
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import Batches, row_location
from indictune.data.columns import BETWEEN_TEXTS
from indictune.files import cache_folder, content_digest, kept_in, locked
from indictune.run import OWN_PROGRESS
from indictune.upstream import versions_of

logger = logging.getLogger(__name__)

_DIGESTS = "digests.json"
READ = ".read"  # of a table of rows that were read and cleaned, and not yet checked
_FACTS = "facts.json"
# Other versions of these may read, clean or tokenise differently.
_READERS = ("datasets", "ftfy", "lingua-language-detector", "pyarrow")
_TOKENIZERS = ("sentencepiece", "tokenizers", "transformers", "trl")
# Errors of file systems that cannot fsync a folder.
_NOT_FOR_FOLDERS = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_STALE_S = 24 * 3600.0
_MAPPED = weakref.WeakSet[mmap.mmap]()


def build_once(kind: str, parts: Sequence[object], what: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills on the first call with these parts; later calls and other processes read it.

    One process fills it under a file lock; the others wait. The kernel releases the lock (flock) of a killed process.
    The lock only saves work. The folder is filled under another name, fsynced and renamed: it is complete or absent.
    If the file system has no locks, or the lock's file is another user's, one process a node fills a folder, and the
    first one is kept. With locks, `make` finds the tables of `write_on` that a killed or stopped process left.

    Args:
        parts: everything that the content depends on, for json, but our code and the versions of libraries.
        what: the content, for messages, such as "The rows".

    Raises:
        UserError: from `make`, or the cache folder cannot be written.
    """
    folder = _folder_of(kind, parts)
    OWN_PROGRESS.passed(f"preparing {what.lower()}")
    with kept_in(folder.parent, what):
        if _is_complete(folder):
            logger.debug("%s: prepared before, in %s", what, folder)
        else:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            with locked(folder, what) as is_of_all:
                if not _is_complete(folder):
                    _build(folder, make, goes_on=is_of_all)
    OWN_PROGRESS.passed(f"having prepared {what.lower()}")
    return folder


def kept_folder(kind: str, parts: Sequence[object]) -> Path | None:
    """The folder that `build_once` has filled before; None if it has not."""
    folder = _folder_of(kind, parts)
    return folder if _is_complete(folder) else None


def _folder_of(kind: str, parts: Sequence[object]) -> Path:
    content = json.dumps([_code_digest(), versions_of(_READERS + _TOKENIZERS), unicodedata.unidata_version, *parts])
    return cache_folder() / "prepared" / f"{kind}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


def build_with_facts(
    kind: str, parts: Sequence[object], what: str, make: Callable[[Path], Mapping[str, Any]]
) -> tuple[Path, Any]:
    """The folder of `build_once`, and what `make` returned, as json has it."""

    def make_and_write(folder: Path) -> None:
        (folder / _FACTS).write_text(json.dumps(make(folder)), encoding="utf-8")

    folder = build_once(kind, parts, what, make_and_write)
    return folder, json.loads((folder / _FACTS).read_text(encoding="utf-8"))


def write_through(path: Path) -> None:
    """Fsync a file or folder, if the file system supports it; raises `OSError` with its path if that fails."""
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
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _build(folder: Path, make: Callable[[Path], None], goes_on: bool) -> None:
    prefix = f".{folder.name}-"
    if goes_on:  # no other process writes to the folder of this name
        unfinished = folder.with_name(f"{prefix}unfinished")
        unfinished.mkdir(exist_ok=True)
        for path in unfinished.iterdir():
            if path.suffix not in _TABLES:
                path.unlink()
    else:
        unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        make(unfinished)
        digests = {path.name: content_digest(path) for path in unfinished.iterdir()}
        (unfinished / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            write_through(path)
        with suppress(OSError):  # a file system may refuse modes
            unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if _is_complete(folder):  # another process was faster, without a lock
                shutil.rmtree(unfinished, ignore_errors=True)
                return
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            unfinished.rename(folder)
        write_through(folder.parent)
    except BaseException as error:
        if not goes_on or isinstance(error, Exception):  # else a signal, after which the same run goes on
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _is_complete(folder: Path) -> bool:
    """Whether the folder exists and all its files have their digests: the disk may have changed a row.

    Reading the files takes a second for 1.4 GB, and brings them to memory, where they are needed next.
    """
    try:
        digests = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return all(content_digest(folder / name) == digest for name, digest in digests.items())


def _remove_stale(parent: Path) -> None:
    """Remove unfinished folders of killed processes: those older than a day."""
    for unfinished in parent.glob(".*-*-*"):
        with suppress(OSError):  # another process removed it, or it is another user's
            last = max(path.stat().st_mtime for path in (unfinished, *unfinished.iterdir()))
            if time.time() - last > _STALE_S:
                shutil.rmtree(unfinished, ignore_errors=True)


_EVERY_S = 5.0
_UNFINISHED, _KEPT = ".unfinished", ".kept"  # behind the name of a table
_TABLES = (".arrow", READ, _UNFINISHED, _KEPT)
_CRC = b"crc32"
_MAGIC_BYTES = 8


def with_progress(batches: Iterable[pa.RecordBatch], what: str, total: int | None = None) -> Batches:
    """Pass record batches on, and log every five seconds how many rows went by, of `total` if known."""
    logged, rows, of_total = time.monotonic(), 0, f" of {total:,}" if total else ""
    for batch in batches:
        yield batch
        OWN_PROGRESS.moved()
        rows += batch.num_rows
        if time.monotonic() - logged > _EVERY_S:
            logger.info("%s: %s%s rows", what, f"{rows:,}", of_total)
            logged = time.monotonic()


def write_table(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], what: str = "", total: int | None = None
) -> None:
    """Write record batches, which may be those of the table at `path`, as an Arrow file, one after the other.

    `what` and `total` are those of `with_progress`; without `what`, nothing is logged.
    """
    unfinished = path.with_name(f"{path.name}{_UNFINISHED}")
    with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in with_progress(batches, what, total) if what else batches:
            writer.write_batch(batch, {_CRC: _crc_of(batch)})
    unfinished.rename(path)


def write_on(
    path: Path, schema: pa.Schema, batches_from: Callable[[int], Batches], what: str, total: int | None = None
) -> None:
    """As `write_table`, but from where a killed process stopped: `batches_from(n)` gives all but the first n."""
    kept = path.with_name(f"{path.name}{_KEPT}")
    left = [file for file in (path, path.with_name(f"{path.name}{_UNFINISHED}"), kept) if file.exists()]
    if left:
        max(left, key=lambda file: file.stat().st_size).replace(kept)

    def batches() -> Batches:
        count = 0
        for count, batch in enumerate(_whole_batches(kept) if left else (), 1):  # noqa: B007
            yield batch
        yield from batches_from(count)

    write_table(path, schema, batches(), what, total)
    kept.unlink(missing_ok=True)


def _whole_batches(path: Path) -> Batches:
    """The batches at the begin of an Arrow file, up to the first one that is not as it was written."""
    with pa.OSFile(str(path)) as file:
        file.seek(_MAGIC_BYTES)  # behind which an Arrow file is a stream
        with suppress(pa.ArrowException, OSError, StopIteration, TypeError, KeyError):
            reader = pa.ipc.open_stream(file)
            while (given := reader.read_next_batch_with_custom_metadata()) and given[1][_CRC] == _crc_of(given[0]):
                yield given[0]


def _crc_of(batch: pa.RecordBatch) -> bytes:
    return b"%d" % zlib.crc32(batch.serialize())


def map_table(path: Path) -> pa.Table:
    """The table of a file, mapped: only what is read comes into memory, and processes share it."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _MAPPED.add(mapped)
    return pa.ipc.open_file(pa.py_buffer(mapped)).read_all()


def forget_mapped() -> None:
    """Give the memory of all mapped tables back. What is read again comes from the page cache of the system."""
    for mapped in _MAPPED:
        mapped.madvise(mmap.MADV_DONTNEED)


def counts_of(column: pa.ChunkedArray) -> dict[Any, int]:
    """How often each value stands in a column, without an object of Python for each row."""
    return {each["values"]: each["counts"] for each in pc.value_counts(column).to_pylist()}


def stored_batches(path: Path) -> Batches:
    """The record batches of a file. Each is read, not mapped, so its memory is freed after use."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def smaller_batches(batches: Iterable[pa.RecordBatch], rows: int) -> Batches:
    """The same rows, at most `rows` at a time."""
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def with_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The same rows with another content of a column."""
    return batch.set_column(batch.schema.get_field_index(name), name, column)


def repeated_batches(path: Path, times: npt.NDArray[np.integer | np.bool_]) -> Batches:
    """The rows of a table, each as often as said, int or bool [rows]; they keep their order."""
    start = 0
    for batch in stored_batches(path):
        of_batch = times[start : start + batch.num_rows]
        yield batch.take(pa.array(np.repeat(np.arange(batch.num_rows), of_batch)))
        start += batch.num_rows


MAX_LISTED_ROWS = 20

# Compared with the held-out rows at a time: each comparison gathers their texts again.
_LEAK_BATCHES = 10
_TEXTS_AT_ONCE = 10_000


class Column:
    """The texts of a column of a table, without holding all of them as Python objects. It can be read many times.

    `between` is what stands between the two texts of a pair.
    """

    def __init__(self, column: pa.ChunkedArray, between: str = BETWEEN_TEXTS) -> None:
        self._column, self._between = column, between

    def __iter__(self) -> Iterator[str]:
        for chunk in self._column.chunks:
            for start in range(0, len(chunk), _TEXTS_AT_ONCE):
                some = chunk.slice(start, _TEXTS_AT_ONCE)
                yield from pc.replace_substring(some, BETWEEN_TEXTS, self._between).to_pylist()
                forget_mapped()


@dataclass(frozen=True)
class StoredRows:
    """The rows of one split.

    Attributes:
        table: with a column `line` (int64), from 1: line in the file, or in other files and datasets the row.
        source: the file or dataset they come from, as messages name it; `origin` is the flag that named it.
        files: of the split, if it has several; `line` then includes the file's number times `LINES_PER_FILE`.
    """

    table: pa.Table
    source: str
    origin: str
    files: Sequence[str] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def texts(self) -> Iterable[str]:
        """The texts of the rows, each access from the first."""
        return Column(self.table["text"])

    @property
    def words(self) -> Iterable[str]:
        """The same, with a space between the two texts of a pair."""
        return Column(self.table["text"], " ")

    def location(self, index: int) -> str:
        """Where row `index` (from 0) stands: `file:line`."""
        return row_location(self.source, self.table["line"][index].as_py(), self.files)


def are_pairs(texts: Iterable[str]) -> bool:
    """Whether texts of rows, all of one kind, are pairs."""
    return BETWEEN_TEXTS in next(iter(texts), "")


def separated(texts: Sequence[str]) -> list[list[str]]:
    """Texts of rows as a tokenizer takes them: one list, or for pairs two, of the first texts and the second ones."""
    return list(map(list, zip(*(text.split(BETWEEN_TEXTS) for text in texts), strict=True)))


def chosen_texts(texts: Iterable[str], chosen: npt.NDArray[np.bool_]) -> dict[int, str]:
    """The texts of the chosen rows, bool [rows], by number."""
    return dict(zip(np.flatnonzero(chosen).tolist(), compress(texts, chosen), strict=True))


def leaked_rows(
    path: Path, held_out: pa.Table, text_of: Callable[[pa.RecordBatch], pa.Array]
) -> npt.NDArray[np.bool_]:
    """Which rows of the table at `path` have a text that held-out rows have too, bool [rows]."""
    values = pa.chunked_array([text_of(batch) for batch in held_out.to_batches()], pa.string())
    batches, masks = stored_batches(path), [np.zeros(0, np.bool_)]
    while some := list(islice(batches, _LEAK_BATCHES)):
        masks.append(pc.is_in(pa.chunked_array([text_of(batch) for batch in some]), value_set=values).to_numpy())
    return np.concatenate(masks)


def text_keys(texts: Iterable[str], salt: str = "-") -> npt.NDArray[np.uint64]:
    """A hash of each text, uint64 [texts]; equal for equal texts. Another salt gives others."""
    digests = (blake2b(text.encode(), digest_size=8, key=salt.encode()).digest() for text in texts)
    return np.fromiter(map(int.from_bytes, digests), np.uint64)
