"""Read data files strictly: each cell is the text in the file, with its line."""

from __future__ import annotations

import codecs
import difflib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.bad_rows import TEXT_EXTENSIONS, BadRows
from indictune.data.columns import check_columns, check_schema, text_batch, typed_rows
from indictune.data.delimited import delimited_rows
from indictune.data.json_rows import json_elements, json_lines, kind_of, record_rows
from indictune.errors import UserError

EXTENSIONS = (*TEXT_EXTENSIONS, ".parquet")
RECORD_EXTENSIONS = (".json", ".jsonl", ".parquet")
# Rows held as Python objects before they become arrow arrays. This bounds the memory.
_CHUNK_ROWS = 20_000
_SIGNATURES = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip or Excel",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1\x15": "parquet",
}
# From Arrow, and from making Python objects: texts that are not UTF-8, times that Python cannot hold.
_PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)

Each = TypeVar("Each")
Row = tuple[int, tuple[str | None, ...]]
Record = tuple[int, dict[str, object]]


def read_batches(
    path: str,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
    extension: str = "",
    lists: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """Read the named columns of a csv, tsv, json, jsonl or parquet file, some thousand rows at a time.

    csv and tsv: one header line, quotes doubled inside quotes, as pandas and spreadsheets write them. jsonl: one
    object a line. json: a list of objects, or an object with such a list as `data`. All of them in UTF-8, with or
    without a byte order mark; blank lines are skipped. Numbers and booleans arrive as the text they are written as.

    Args:
        path: the file.
        columns: role ("text", "label", "language") -> name of a column that the file must have.
        optional: the same for columns that may be missing; their cells are then null.
        bad: gets the rows that cannot be read.
        extension: says how to read the file; default: the file's own.
        lists: names of columns that may hold lists, which are joined as `a|b`.

    Yields:
        A nullable string column for each role, and `line` (int64): the first line of the row in the file, from 1; in
        parquet the number of the row. At least one batch, unless all rows are bad.

    Raises:
        UserError: the file or a column is missing, the file holds no rows or cannot be read as its extension says;
            after the rows, the problems in `bad`.
    """
    extension = extension or Path(path).suffix.lower()
    _check_file(path, extension, EXTENSIONS)
    if extension == ".parquet":
        batches = _parquet_batches(path, columns, optional, bad, lists)
    elif extension in RECORD_EXTENSIONS:
        records = json_lines(path, bad) if extension == ".jsonl" else json_elements(path, bad)
        batches = _batches(record_rows(path, records, columns, optional, bad, lists), columns, optional)
    else:
        delimiter = "," if extension == ".csv" else "\t"
        batches = _batches(delimited_rows(path, delimiter, columns, optional, bad), columns, optional)
    yield from _checked(path, batches, bad)


def read_records(path: str, bad: BadRows, extension: str = "") -> Iterator[Record]:
    """Read a json, jsonl or parquet file whose values may be lists and objects, a row at a time.

    json and jsonl as in `read_batches`: a number is the text it is written as.

    Args:
        path: the file.
        bad: gets the rows that cannot be read.
        extension: says how to read the file; default: the file's own.

    Yields:
        The first line of a row, from 1 (in parquet the number of the row), and the row.

    Raises:
        UserError: the file is missing, holds no rows or cannot be read as its extension says; after the rows, the
            problems in `bad`.
    """
    extension = extension or Path(path).suffix.lower()
    _check_file(path, extension, RECORD_EXTENSIONS)
    read = {".json": json_elements, ".jsonl": json_lines}.get(extension, _parquet_records)
    for line, record in _checked(path, read(path, bad), bad):
        if isinstance(record, dict):
            yield line, record
        else:
            bad.add_broken(line, "not-an-object", record, held=kind_of(record))


def _checked(path: str, items: Iterator[Each], bad: BadRows) -> Iterator[Each]:
    """Pass items on, then raise the file's problems, or refuse a file without any."""
    empty = True
    for item in items:
        empty = False
        yield item
    bad.problems.raise_any()
    if empty and not bad.count:
        raise UserError("no-rows", value=path)


def _check_file(path: str, extension: str, extensions: Sequence[str]) -> None:
    """Refuse a file that is missing, or of another kind than its name says."""
    file = Path(path)
    if extension not in extensions:
        raise UserError("file-kind-unknown", value=path, expected=", ".join(extensions))
    if not file.exists():
        near = difflib.get_close_matches(file.name, _names_in(file.parent), n=1)
        raise UserError("no-such-file", value=path, way_out=f"Did you mean {file.parent / near[0]}?" if near else None)
    if not file.is_file():
        raise UserError("folder-for-file", value=path)
    try:
        with file.open("rb") as opened:
            start = opened.read(5)
    except OSError as error:
        raise UserError("unreadable", value=path, reason=error.strerror) from error
    if not start:
        raise UserError("file-empty", value=path)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError("file-is-utf16", value=path)
    kind = next((kind for begin, kind in _SIGNATURES.items() if start.startswith(begin)), None)
    if kind is not None and not (kind == "parquet" and extension == ".parquet"):
        raise UserError("file-kind-other", value=path, kind=kind)


def _names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def _batches(rows: Iterator[Row], columns: Mapping[str, str], optional: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    names = [*columns, *optional]
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        arrays = [_strings([cells[index] for _, cells in chunk]) for index in range(len(names))]
        lines = pa.array([line for line, _ in chunk], pa.int64())
        yield pa.record_batch([*arrays, lines], names=[*names, "line"])


def _strings(values: list[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # half of a \ud83d\ude00 pair: a tweet cut inside an emoji
        return pa.array([value and without_surrogates(value) for value in values], pa.string())


def without_surrogates(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parquet_batches(
    path: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows, lists: Collection[str]
) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            present = file.schema_arrow.names
            names = {**columns, **{role: name for role, name in optional.items() if name in present}}
            check_columns(path, present, names)
            first_row = 1
            for batch in file.iter_batches(_CHUNK_ROWS, columns=list(dict.fromkeys(names.values()))):
                yield text_batch(batch, names, list(optional), path, first_row, bad, lists)
                first_row += batch.num_rows
    except _PARQUET_ERRORS as error:
        raise _parquet_error(path, error) from error


def _parquet_records(path: str, bad: BadRows) -> Iterator[Record]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_schema(path, file.schema_arrow)
            first_row = 1
            for batch in file.iter_batches(_CHUNK_ROWS):
                yield from typed_rows(batch, first_row, bad)
                first_row += batch.num_rows
    except _PARQUET_ERRORS as error:
        raise _parquet_error(path, error) from error


def _parquet_error(path: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError("parquet-unreadable", value=path, reason=reason)
