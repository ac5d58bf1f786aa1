"""Strict readers of data files: every cell arrives as the text that stands in the file, with its line."""

from __future__ import annotations

import codecs
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.bad_rows import TEXT_EXTENSIONS, BadRows
from indictune.data.columns import check_columns, check_schema, text_batch, typed_rows
from indictune.data.delimited import delimited_rows
from indictune.data.json_rows import json_elements, json_lines, kind_of, record_rows
from indictune.errors import UserError

EXTENSIONS = (*TEXT_EXTENSIONS, ".parquet")
RECORD_EXTENSIONS = (".json", ".jsonl", ".parquet")
# Rows held as Python objects before they become arrow arrays; it bounds the memory over that of the texts themselves.
_CHUNK_ROWS = 20_000
_SIGNATURES = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip or Excel",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1\x15": "parquet",
}
# Of Arrow, and of making Python objects: texts that are no UTF-8, times that Python has no numbers for.
_PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)

Row = tuple[int, tuple[str | None, ...]]
Record = tuple[int, dict[str, object]]


def read_batches(
    path: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows, extension: str = ""
) -> Iterator[pa.RecordBatch]:
    """Read the named columns of a csv, tsv, json, jsonl or parquet file, some thousand rows at a time.

    csv and tsv: one header line, quotes doubled inside quotes, as pandas and spreadsheets write them. jsonl: one
    object a line. json: a list of objects, or an object with such a list as `data`. All of them in UTF-8, with or
    without a byte order mark; blank lines are skipped. Numbers and booleans arrive as the text they are written as.

    Args:
        path: the file.
        columns: role ("text", "label", "language") -> name of the column in the file, which must be there.
        optional: the same for columns that may be missing; their cells are null then.
        bad: gets the rows that cannot be read.
        extension: says how the file is read; without it the file's own.

    Yields:
        One nullable string column a role and `line` (int64): the line of the file on which the row begins, counted
        from 1; for parquet the number of the row. At least one batch, unless all rows are bad.

    Raises:
        UserError: the file or a column is missing, the file holds no rows or cannot be read as what its extension
            says; after the rows, the problems in `bad`.
    """
    extension = extension or Path(path).suffix.lower()
    _check_file(path, extension, EXTENSIONS)
    if extension == ".parquet":
        batches = _parquet_batches(path, columns, optional, bad)
    elif extension in RECORD_EXTENSIONS:
        records = json_lines(path, bad) if extension == ".jsonl" else json_elements(path, bad)
        batches = _batches(record_rows(path, records, columns, optional, bad), columns, optional)
    else:
        delimiter = "," if extension == ".csv" else "\t"
        batches = _batches(delimited_rows(path, delimiter, columns, optional, bad), columns, optional)
    empty = True
    for batch in batches:
        empty = False
        yield batch
    bad.problems.raise_any()
    if empty and not bad.count:
        raise UserError(f"{path}: the file holds no rows.")


def read_records(path: str, bad: BadRows, extension: str = "") -> Iterator[Record]:
    """Read a json, jsonl or parquet file whose values may be lists and objects, a row at a time.

    json and jsonl as in `read_batches`: numbers arrive as the text they are written as.

    Args:
        path: the file.
        bad: gets the rows that cannot be read.
        extension: says how the file is read; without it the file's own.

    Yields:
        The line on which a row begins, counted from 1 (for parquet the number of the row), and the row.

    Raises:
        UserError: the file is missing, holds no rows or cannot be read as what its extension says; after the rows,
            the problems in `bad`.
    """
    extension = extension or Path(path).suffix.lower()
    _check_file(path, extension, RECORD_EXTENSIONS)
    read = {".json": json_elements, ".jsonl": json_lines}.get(extension)
    empty = True
    for line, record in read(path, bad) if read else _parquet_records(path, bad):
        empty = False
        if isinstance(record, dict):
            yield line, record
        else:
            bad.add_broken(line, f"holds {kind_of(record)}, expected an object.", record)
    bad.problems.raise_any()
    if empty and not bad.count:
        raise UserError(f"{path}: the file holds no rows.")


def _check_file(path: str, extension: str, extensions: Sequence[str]) -> None:
    file = Path(path)
    if extension not in extensions:
        raise UserError(f"{path}: files of this kind are not read; expected one of {', '.join(extensions)}.")
    if not file.exists():
        near = difflib.get_close_matches(file.name, _names_in(file.parent), n=1)
        hint = f" Did you mean {file.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: no such file.{hint}")
    if not file.is_file():
        raise UserError(f"{path}: this is a folder, expected a file.")
    try:
        with file.open("rb") as opened:
            start = opened.read(5)
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not start:
        raise UserError(f"{path}: the file is empty.")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f'{path}:1: this is UTF-16 (Excel\'s "Unicode text"); save it as UTF-8.')
    kind = next((kind for begin, kind in _SIGNATURES.items() if start.startswith(begin)), None)
    if kind is not None and not (kind == "parquet" and extension == ".parquet"):
        raise UserError(f"{path}: this is a {kind} file, whatever its name says; unpack or rename it.")


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
    except UnicodeEncodeError:  # half of a \ud83d\ude00 pair, as tweets cut in the middle of an emoji have it
        return pa.array([value and without_halves(value) for value in values], pa.string())


def without_halves(text: str) -> str:
    """The text with a replacement character for each half of a surrogate pair, which no file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parquet_batches(
    path: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            present = file.schema_arrow.names
            names = {**columns, **{role: name for role, name in optional.items() if name in present}}
            check_columns(path, present, names)
            first_row = 1
            for batch in file.iter_batches(_CHUNK_ROWS, columns=list(dict.fromkeys(names.values()))):
                yield text_batch(batch, names, list(optional), path, first_row, bad)
                first_row += batch.num_rows
    except _PARQUET_ERRORS as error:
        raise _no_parquet(path, error) from error


def _parquet_records(path: str, bad: BadRows) -> Iterator[Record]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_schema(path, file.schema_arrow)
            first_row = 1
            for batch in file.iter_batches(_CHUNK_ROWS):
                yield from typed_rows(batch, first_row, bad)
                first_row += batch.num_rows
    except _PARQUET_ERRORS as error:
        raise _no_parquet(path, error) from error


def _no_parquet(path: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{path}: cannot be read as parquet ({reason}).")
