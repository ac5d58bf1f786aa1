"""Divide the rows of input files into parts, which processes read and label independently."""

from __future__ import annotations

import io
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.bad_rows import BadRows
from indictune.data.read.arrow_files import arrow_errors
from indictune.data.read.delimited import DELIMITERS
from indictune.data.read.open_files import opened
from indictune.errors import Problems, UserError, attributed_to
from indictune.files import kind_of_file
from indictune.prediction.labelled_rows import LINES, WINDOW_ROWS, TextFile, named_window
from indictune.prediction.stores import Store, is_url, stored_file

_OF_LINES = (*DELIMITERS, ".jsonl", ".ndjson", LINES)
_MOST_PARTS = 1_024  # of a file that is read before: each is a file that is looked for
_ROWS_OF_GROUPS = 65_536  # that row groups of a parquet file have together, if it is one of many files
_END = 1 << 62

Windows = Iterator[pa.RecordBatch]
Result = TypeVar("Result")


@dataclass(frozen=True)
class InputPart:
    """Rows that one process labels at a time.

    Attributes:
        file: a path or a URL.
        rows: the first row, from 0, and the one behind the last; None for all rows of a file that nobody counted.
        place: the first byte of its lines and the one behind them, or of parquet its rows; None for the whole file.
        head: bytes at the begin of the file that each of its parts needs, such as a csv file's header.
        crc: of its rows, as they were read before; None if they were not.
        version: what changes when the content of a file that was not read before does.
    """

    number: int
    file: str
    rows: tuple[int, int] | None = None
    place: tuple[int, int] | None = None
    head: int = 0
    crc: int | None = None
    version: str = ""

    @property
    def name(self) -> str:
        """The name of the file of its labels, without an extension."""
        of_rows = f"-rows-{self.rows[0]}-{self.rows[1] - 1}" if self.rows else ""
        return f"part-{self.number:05d}-{Path(self.file).name.split('.')[0]}{of_rows}"

    @staticmethod
    def of_json(content: dict[str, Any]) -> InputPart:
        """A part as `dataclasses.asdict` gave it, and json kept it."""
        pairs = {name: tuple(content[name]) for name in ("rows", "place") if content[name] is not None}
        return InputPart(**{**content, **pairs})


def version_of(file: str) -> str:
    """What changes when the content of a file does."""
    if is_url(file):
        return next(iter(Store(file, "--input_file").files(file).values()))
    status = os.stat(file)
    return f"{os.path.abspath(file)} {status.st_size} {status.st_mtime_ns}"


def counted_parts(file: TextFile, bad: BadRows) -> list[InputPart]:
    """The parts of a local file, which is read to its end, so that it is refused before the weights are read."""
    lines, crcs, rows = list[int](), list[int](), 0
    for window in file.numbered_windows(bad):
        lines.append(window["line"][0].as_py())
        crcs.append(_crc_of(window := named_window(window)))
        rows += window.num_rows
    bad.finish(rows)
    group = _largest_group(file.path)
    windows = max(1, -(-len(lines) // _MOST_PARTS), -(-group // WINDOW_ROWS))  # of a part
    starts = range(0, len(lines), windows)
    places, head = _places(file.path, [lines[start] for start in starts], in_groups=group > 0)
    parts = []
    for number, start in enumerate(starts):
        end = min(rows, (start + windows) * WINDOW_ROWS)
        place = places[number] if places else None
        crc = _crc_of_all(crcs[start : start + windows])
        parts.append(InputPart(number, file.path, (start * WINDOW_ROWS, end), place, head, crc))
    return parts


def _places(path: str, lines: Sequence[int], in_groups: bool) -> tuple[list[tuple[int, int]], int]:
    """Where the parts that begin on these lines are in a file, and its head; none if only reading all of it shows."""
    if in_groups:
        return [(first - 1, after - 1) for first, after in zip(lines, [*lines[1:], _END], strict=True)], 0
    if Path(path).suffix.lower() not in _OF_LINES:
        return [], 0
    starts, left, at = list[int](), set(lines), 0
    with opened(path) as file:
        if isinstance(file, io.BytesIO):  # of UTF-16, which has other bytes
            return [], 0
        for number, line in enumerate(file, 1):
            if number in left:
                starts.append(at)
            at += len(line)
    if len(starts) != len(lines):  # the lines of old Macs
        return [], 0
    return list(zip(starts, [*starts[1:], at], strict=True)), starts[0] if starts else 0


def _largest_group(path: str) -> int:
    """Rows of the largest row group of a parquet file; 0 if a part of it would read much more than its rows."""
    if not path.lower().endswith(".parquet"):
        return 0
    with arrow_errors(path):
        metadata = pq.read_metadata(path)
    rows = max((metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)), default=0)
    return rows if rows <= _ROWS_OF_GROUPS else 0


def parts_of_files(versions: Mapping[str, str], keeps_damaged: bool) -> list[InputPart]:
    """Parts of many files by their versions. Only the ends of parquet files are read.

    Raises `UserError` for damaged ones, or keeps each as one part, of which the reason comes when it is read.
    """
    parts, problems = list[InputPart](), Problems()
    for file, version in versions.items():
        places: list[tuple[int, int] | None] = [None]
        if file.lower().endswith(".parquet"):
            with problems.collecting():
                places = list(_groups_of_rows(_of_file(file, pq.read_metadata)))
        numbered = enumerate(places, len(parts))
        parts += [InputPart(number, file, place, place, version=version) for number, place in numbered]
    if not keeps_damaged:
        problems.raise_any()
    return parts


def _groups_of_rows(metadata: pq.FileMetaData) -> Iterator[tuple[int, int]]:
    first = end = 0
    for number in range(metadata.num_row_groups):
        end += metadata.row_group(number).num_rows
        if end - first >= _ROWS_OF_GROUPS or number == metadata.num_row_groups - 1:
            yield first, end
            first = end


@dataclass(frozen=True)
class InputFiles:
    """Files of texts: which columns are read, and of each path or URL what changes when its content does.

    `counted` are the parts of one local file whose rows were read once; `bad` its rows that cannot be read.
    """

    file: TextFile
    versions: Mapping[str, str]
    bad: BadRows
    counted: Sequence[InputPart] = ()

    @classmethod
    def of(cls, file: TextFile, bad: BadRows) -> InputFiles:
        """A local file, read to its end, so that it is refused before the weights are read."""
        with attributed_to(file.flag):
            parts = counted_parts(file, bad)
        for remark in bad.remarks:
            print(f"{file.flag} {remark}", file=sys.stderr)
        return cls(file, local_versions([file.path]), bad, parts)

    @property
    def rows(self) -> int | None:
        """Of one file that was read; None for others."""
        return self.counted[-1].rows[1] if self.counted and self.counted[-1].rows else None

    @cached_property
    def parts(self) -> Sequence[InputPart]:
        """All parts, for which the ends of many parquet files are read once; `UserError` if a file is damaged."""
        return self.counted or parts_of_files(self.versions, self.bad.skips_damage)


def local_versions(paths: Iterable[str]) -> dict[str, str]:
    """What changes when the content of local files does."""
    return {path: version_of(path) for path in paths}


def read_parts(
    parts: Iterable[InputPart], file: TextFile, bad_of: Callable[[InputPart], BadRows]
) -> Iterator[tuple[InputPart, Windows]]:
    """The rows of each part, in windows; those of a part must be taken before the next part's.

    `file` says which columns are read. `bad_of` makes a collector of a part's bad rows. The windows raise `UserError`
    for bad rows of a part that was not read before, and if a file cannot be read, or changed meanwhile.
    """
    together = dict[str, list[InputPart]]()  # of files that can only be read as a whole
    for part in parts:
        if part.rows is not None and part.place is None:
            together.setdefault(part.file, []).append(part)
        else:
            bad = bad_of(part)
            yield part, _checked(part, _windows(part, file, bad), bad)
    for path, some in together.items():
        bad = bad_of(some[0])
        whole = replace(file, path=path).windows(bad)
        at = 0
        for part in some:
            assert part.rows is not None
            first, end = (-(-row // WINDOW_ROWS) for row in part.rows)
            for _ in range(at, first):
                next(whole)
            at = end
            yield part, _checked(part, (next(whole) for _ in range(first, end)), bad)


def _windows(part: InputPart, file: TextFile, bad: BadRows) -> Windows:
    with _local(part) as path:
        try:
            yield from replace(file, path=path).windows(bad)
        except UserError as error:  # it names the copy
            named = (replace(each, value=str(each.value).replace(path, part.file)) for each in error.problems)
            raise UserError(problems=Problems(named)) from error


def _checked(part: InputPart, windows: Windows, bad: BadRows) -> Windows:
    crcs, rows = [], 0
    for window in windows:
        rows += window.num_rows
        if part.crc is not None:
            crcs.append(_crc_of(window))
        yield window
    if part.crc is None:
        bad.finish(rows)
        is_same = part.version == version_of(part.file)
    else:
        is_same = part.crc == _crc_of_all(crcs)
    if not is_same:
        raise UserError("input-changed", "--input_file", part.file)


def _crc_of(window: pa.RecordBatch) -> int:
    return zlib.crc32(repr(window.to_pydict()).encode())  # equal rows may have other buffers


def _crc_of_all(crcs: Sequence[int]) -> int:
    return zlib.crc32(repr(crcs).encode())


@contextmanager
def _local(part: InputPart) -> Iterator[str]:
    """The path of a local file with the rows of a part: its own file, or a copy."""
    if part.place is None and not is_url(part.file):
        yield part.file
        return
    with TemporaryDirectory() as folder:
        path, store = Path(folder, Path(part.file).name), stored_file(part.file)
        if part.place is None:
            store.fetch(path)
        elif kind_of_file(part.file) == ".parquet":
            first, end = part.place
            _of_file(part.file, lambda source: _copy_rows(source, path, first, end))
        else:
            with store.opened() as source, path.open("wb") as copy:
                copy.write(source.read(part.head))
                source.seek(part.place[0])
                copy.write(source.read(part.place[1] - part.place[0]))
        yield str(path)


def _of_file(file: str, take: Callable[[Any], Result]) -> Result:
    """What `take` reads of a parquet file. If a store fails, all of the file is fetched, patiently.

    Raises `UserError` if the file is damaged, or the store stays unreachable.
    """
    stored = stored_file(file)
    if is_url(file):
        try:
            with stored.opened() as source:
                return take(source)
        except Exception:  # of the store, or a damaged file: the copy shows which
            with TemporaryDirectory() as folder, arrow_errors(file):
                copy = Path(folder, "copy.parquet")
                stored.fetch(copy)
                return take(str(copy))
    with arrow_errors(file), stored.opened() as source:
        return take(source)


def _copy_rows(source: Any, path: Path, first: int, end: int) -> None:
    """Write rows of a parquet file, of which only their row groups are read, to another one."""
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        groups, at, skipped = list[int](), 0, 0
        for number in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if at + rows <= first:
                skipped += rows
            elif at < end:
                groups.append(number)
            at += rows
        table = file.read_row_groups(groups)
        pq.write_table(table.slice(first - skipped, end - first), path)
