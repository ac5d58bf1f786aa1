"""Read data files strictly: each cell is the text in the file, with its line."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from indictune.data.bad_rows import BadRows
from indictune.data.read.arrow_files import ARROW_EXTENSIONS, arrow_batches, arrow_records
from indictune.data.read.delimited import SHEET_EXTENSIONS, delimited_rows, sheet_rows
from indictune.data.read.file_form import DELIMITERS, STANDARD, FileForm
from indictune.data.read.json_files import (
    decoded_json_lines,
    holds_lines,
    json_by_columns,
    json_elements,
    kind_of,
    record_rows,
)
from indictune.data.read.open_files import kind_of_file
from indictune.errors import UserError

RECORD_EXTENSIONS = (".json", ".jsonl", ".ndjson", *ARROW_EXTENSIONS)
EXTENSIONS = (*DELIMITERS, *RECORD_EXTENSIONS, *SHEET_EXTENSIONS)
# Rows held as Python objects before they become arrow arrays. This bounds the memory.
CHUNK_ROWS = 20_000

Each = TypeVar("Each")
Row = tuple[int, tuple[str | None, ...]]
Record = tuple[int, dict[str, object]]


def read_batches(
    path: str,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
    lists: frozenset[str] = frozenset(),
    form: FileForm = STANDARD,
) -> Iterator[pa.RecordBatch]:
    """Read the named columns of a file, some thousand rows at a time. A file with `.gz` or `.zst` is unpacked.

    csv and tsv: one header line, quotes doubled inside quotes, as pandas and spreadsheets write them. jsonl: one
    object a line. json: the same, or a list of objects, an object with such a list as `data`, or the columns as pandas
    writes them. All of them in UTF-8, with or without a byte order mark; blank lines are skipped. Numbers and booleans
    arrive as the text they are written as. parquet and arrow: class ids become the names that the file declares.
    xlsx and ods: the first sheet.

    Args:
        path: the file.
        columns: role ("text", "label", "language") -> name of a column that the file must have.
        optional: the same for columns that may be missing; their cells are then null.
        bad: gets the rows that cannot be read.
        lists: roles of columns that may hold lists, which are joined as `a|b`.
        form: of csv and tsv files, and sheets.

    Yields:
        A nullable string column for each role, and `line` (int64): the first line of the row in the file, from 1; in
        other files the number of the row. At least one batch, unless all rows are bad.

    Raises:
        UserError: the file or a column is missing, the file holds no rows or cannot be read as its extension says.
    """
    extension = checked_extension(path, EXTENSIONS)
    if extension in RECORD_EXTENSIONS and form != STANDARD:
        bad.remark(f"{path}: ignoring --delimiter, --column_names and --quoting, which are for csv files and sheets.")
    if extension in ARROW_EXTENSIONS:
        batches = arrow_batches(path, columns, optional, bad, lists, CHUNK_ROWS)
    elif extension in DELIMITERS:
        batches = _batches(delimited_rows(path, columns, optional, bad, form), columns, optional)
    elif extension in SHEET_EXTENSIONS:
        batches = _batches(sheet_rows(path, columns, optional, bad, form), columns, optional)
    else:
        values = json_by_columns(path, bad) if extension == ".json" else None
        rows = record_rows(path, values or _json_values(path, extension, bad), columns, optional, bad, lists)
        batches = _batches(rows, columns, optional)
    yield from _checked(path, batches, bad)


def read_records(path: str, bad: BadRows) -> Iterator[Record]:
    """Read a json, jsonl, parquet or arrow file whose values may be lists and objects, a row at a time.

    json and jsonl as in `read_batches`: a number is the text it is written as. `bad` gets the unreadable rows.

    Yields:
        The first line of a row, from 1 (in parquet and arrow files the number of the row), and the row.

    Raises:
        UserError: the file is missing, holds no rows or cannot be read as its extension says.
    """
    extension = checked_extension(path, RECORD_EXTENSIONS)
    records = arrow_records(path, CHUNK_ROWS) if extension in ARROW_EXTENSIONS else _json_values(path, extension, bad)
    for line, record in _checked(path, records, bad):
        if isinstance(record, dict):
            yield line, record
        else:
            bad.add(line, "not-an-object", record, held=kind_of(record))


def _checked(path: str, items: Iterator[Each], bad: BadRows) -> Iterator[Each]:
    """Pass items on, then raise the file's problems, or refuse a file without any."""
    empty = True
    for item in items:
        empty = False
        yield item
    if bad.problems:
        bad.finish(0)
    if empty and not bad.count:
        raise UserError("no-rows", value=path)


def checked_extension(path: str, extensions: Sequence[str] = ()) -> str:
    """The extension that says how to read a file: one of `extensions`, or any if there are none.

    Raises:
        UserError: there is no such file, or none that can be opened and read.
    """
    file = Path(path)
    extension = kind_of_file(path)
    if extensions and extension not in extensions:
        raise UserError("file-kind-unknown", value=path, expected=", ".join(extensions))
    if not file.exists():
        names = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, names, n=1)
        raise UserError("no-such-file", value=path, way_out=f"Did you mean {file.parent / near[0]}?" if near else None)
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError("unreadable", value=path, reason=error.strerror) from error
    return extension


def _json_values(path: str, extension: str, bad: BadRows) -> Iterator[tuple[int, object]]:
    is_list = extension == ".json" and not holds_lines(path)
    return json_elements(path, bad) if is_list else decoded_json_lines(path, bad)


def _batches(rows: Iterator[Row], columns: Mapping[str, str], optional: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    names = [*columns, *optional]
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        arrays = [pa.array([cells[index] for _, cells in chunk], pa.string()) for index in range(len(names))]
        lines = pa.array([line for line, _ in chunk], pa.int64())
        yield pa.record_batch([*arrays, lines], names=[*names, "line"])
