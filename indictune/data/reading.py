"""Strict readers of data files: every cell arrives as the text that stands in the file, with its line."""

from __future__ import annotations

import codecs
import csv
import difflib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.columns import check_columns, text_batch
from indictune.errors import Problems, UserError

_TEXT_EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl")
EXTENSIONS = (*_TEXT_EXTENSIONS, ".parquet")
RECORD_EXTENSIONS = (".json", ".jsonl", ".parquet")
# Rows held as Python objects before they become arrow arrays; it bounds the memory over that of the texts themselves.
_CHUNK_ROWS = 20_000
_MAX_BROKEN_LINES = 5
_NO_COLUMNS: Mapping[str, str] = {}

# Numbers stay the text they were written as: 1e5 as a text is "1e5". NaN is what pandas writes for a missing value.
_JSON = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=lambda name: None if name == "NaN" else name)
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_LIST = re.compile(r'\s*(?:\{\s*(?:[^\[]*,\s*)?"data"\s*:\s*)?\[')

Row = tuple[int, tuple[str | None, ...]]
Record = tuple[int, dict[str, object]]


def read_table(path: str, columns: Mapping[str, str], optional: Mapping[str, str] = _NO_COLUMNS) -> pa.Table:
    """All rows of `read_batches` as one table."""
    return pa.Table.from_batches(list(read_batches(path, columns, optional)))


def read_batches(
    path: str, columns: Mapping[str, str], optional: Mapping[str, str] = _NO_COLUMNS
) -> Iterator[pa.RecordBatch]:
    """Read the named columns of a csv, tsv, json, jsonl or parquet file, some thousand rows at a time.

    csv and tsv: one header line, quotes doubled inside quotes, as pandas and spreadsheets write them. jsonl: one
    object a line. json: a list of objects, or an object with such a list as `data`. All of them in UTF-8, with or
    without a byte order mark; blank lines are skipped. Numbers and booleans arrive as the text they are written as.

    Args:
        path: the file; its extension says how it is read.
        columns: role ("text", "label", "language") -> name of the column in the file, which must be there.
        optional: the same for columns that may be missing; their cells are null then.

    Yields:
        At least one batch, with one nullable string column a role and `line` (int32): the line of the file on which
        the row begins, counted from 1; for parquet the number of the row.

    Raises:
        UserError: the file or a column is missing, the file holds no rows or cannot be read as what its extension
            says. Up to 5 broken lines are listed, each as `path:line`, after the rows of the other lines.
    """
    _check_file(path, EXTENSIONS)
    extension = Path(path).suffix.lower()
    broken = _BrokenLines(path)
    if extension == ".parquet":
        batches = _parquet_batches(path, columns, optional)
    elif extension == ".jsonl":
        batches = _batches(_record_rows(path, _json_lines(path, broken), columns, optional, broken), columns, optional)
    elif extension == ".json":
        records = _json_elements(path, broken)
        batches = _batches(_record_rows(path, records, columns, optional, broken), columns, optional)
    else:
        delimiter = "," if extension == ".csv" else "\t"
        batches = _batches(_delimited_rows(path, delimiter, columns, optional, broken), columns, optional)
    empty = True
    for batch in batches:
        empty = False
        yield batch
    broken.raise_any()
    if empty:
        raise UserError(f"{path}: the file holds no rows.")


def read_records(path: str) -> Iterator[Record]:
    """Read a json, jsonl or parquet file whose values may be lists and objects, a row at a time.

    json and jsonl as in `read_batches`: numbers arrive as the text they are written as.

    Yields:
        The line on which a row begins, counted from 1 (for parquet the number of the row), and the row.

    Raises:
        UserError: the file is missing, holds no rows or cannot be read as what its extension says. Up to 5 broken
            lines are listed, each as `path:line`, after the rows of the other lines.
    """
    _check_file(path, RECORD_EXTENSIONS)
    broken = _BrokenLines(path)
    read = {".json": _json_elements, ".jsonl": _json_lines}.get(Path(path).suffix.lower())
    empty = True
    for line, record in read(path, broken) if read else _parquet_records(path):
        empty = False
        if isinstance(record, dict):
            yield line, record
        else:
            broken.add(line, f"holds {kind_of(record)}, expected an object.")
    broken.raise_any()
    if empty:
        raise UserError(f"{path}: the file holds no rows.")


def place(source: str, line: int) -> str:
    """Where a row stands: `path:line`, as editors open it, or `source row line` for what has no lines to open."""
    return f"{source}:{line}" if Path(source).suffix.lower() in _TEXT_EXTENSIONS else f"{source} row {line}"


class _BrokenLines(Problems):
    """The broken lines of one file; a file of another kind would have millions, so the list is cut."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def add(self, line: int, what: str) -> None:
        self.append(f"{place(self.path, line)}: {what}")
        if len(self) == _MAX_BROKEN_LINES:
            self.append(f"{self.path}: {_MAX_BROKEN_LINES} broken lines found; the lines after them were not read.")
            self.raise_any()


def _check_file(path: str, extensions: Sequence[str]) -> None:
    file = Path(path)
    if file.suffix.lower() not in extensions:
        raise UserError(f"{path}: files of this kind are not read; expected one of {', '.join(extensions)}.")
    if not file.exists():
        near = difflib.get_close_matches(file.name, _names_in(file.parent), n=1)
        hint = f" Did you mean {file.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: no such file.{hint}")
    if not file.is_file():
        raise UserError(f"{path}: this is a folder, expected a file.")
    try:
        with file.open("rb") as opened:
            start = opened.read(2)
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not start:
        raise UserError(f"{path}: the file is empty.")
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError(f'{path}:1: this is UTF-16 (Excel\'s "Unicode text"); save it as UTF-8.')


def _names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def _batches(rows: Iterator[Row], columns: Mapping[str, str], optional: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    names = [*columns, *optional]
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        arrays = [_strings([cells[index] for _, cells in chunk]) for index in range(len(names))]
        lines = pa.array([line for line, _ in chunk], pa.int32())
        yield pa.record_batch([*arrays, lines], names=[*names, "line"])


def _strings(values: list[str | None]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # half of a \ud83d\ude00 pair, as tweets cut in the middle of an emoji have it
        return pa.array([value and without_halves(value) for value in values], pa.string())


def without_halves(text: str) -> str:
    """The text with a replacement character for each half of a surrogate pair, which no file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _decoded_lines(path: str, broken: _BrokenLines) -> Iterator[tuple[int, str]]:
    """Lines with their numbers and line ends. Bytes that are no UTF-8 are noted as broken and replaced."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            codec = "utf-8-sig" if number == 1 else "utf-8"
            try:
                text = line.decode(codec)
            except UnicodeDecodeError as error:
                broken.add(number, f"byte 0x{line[error.start]:02x} is no UTF-8 text; save the file as UTF-8.")
                text = line.decode(codec, "replace")
            yield number, text


def _delimited_rows(
    path: str, delimiter: str, columns: Mapping[str, str], optional: Mapping[str, str], broken: _BrokenLines
) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 131,072 characters refuses long texts
    # Without strict=True, a stray quote is dropped from a text, or swallows all rows up to the next one.
    reader = csv.reader((line for _, line in _decoded_lines(path, broken)), delimiter=delimiter, strict=True)
    width, start = 0, 1
    pick: Callable[[list[str]], tuple[str | None, ...]]
    try:
        for fields in reader:
            line, start = start, reader.line_num + 1
            if not fields:
                continue
            if not width:
                width, pick = len(fields), _picker(path, [name.strip() for name in fields], columns, optional)
            elif len(fields) == width:
                yield line, pick(fields)
            else:
                broken.add(line, f"{_fields(len(fields))} where the header has {width}; {_how_to_quote(delimiter)}")
    except csv.Error as error:
        broken.add(start, f"the row that begins here cannot be read ({error}); {_how_to_quote(delimiter)}")


def _fields(count: int) -> str:
    return f"{count} field" if count == 1 else f"{count} fields"


def _how_to_quote(delimiter: str) -> str:
    what = "comma" if delimiter == "," else "tab"
    return f'a field that holds a {what}, a quote or a line break must be written "like this", with "" for a quote.'


def _picker(
    path: str, header: list[str], columns: Mapping[str, str], optional: Mapping[str, str]
) -> Callable[[list[str]], tuple[str | None, ...]]:
    """The function that takes the wanted cells out of a row with this header."""
    check_columns(path, header, {**columns, **{role: name for role, name in optional.items() if name in header}})
    absent = len(header)  # the cell behind the last one, which is None
    indices = [header.index(name) if name in header else absent for name in (*columns.values(), *optional.values())]
    take = itemgetter(*indices, absent)  # with one more, so that it returns a tuple for a single column too
    return lambda fields: take([*fields, None])[:-1]


def _json_lines(path: str, broken: _BrokenLines) -> Iterator[tuple[int, object]]:
    for number, line in _decoded_lines(path, broken):
        if line.isspace():
            continue
        try:
            value = _JSON.decode(line.rstrip("\r\n"))  # else an object cut short breaks in "column 1" of a next line
        except json.JSONDecodeError as error:
            broken.add(number, f"no valid JSON: {error.msg} (column {error.colno}).")
        except RecursionError:
            broken.add(number, "no valid JSON: nested too deeply.")
        else:
            yield number, value


def _json_elements(path: str, broken: _BrokenLines) -> Iterator[tuple[int, object]]:
    """The elements of a JSON list with the line on which each begins; only the text of the file is held as a whole."""
    text = "".join(line for _, line in _decoded_lines(path, broken))
    opening = _JSON_LIST.match(text)
    if opening is None:
        _refuse_json(path)
    number, counted = 1, 0
    begin = _skip_space(text, opening.end())
    closed = text[begin : begin + 1] == "]"
    try:
        while not closed:
            number, counted = number + text.count("\n", counted, begin), begin
            value, end = _JSON.raw_decode(text, begin)
            yield number, value
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
            closed = text[end] == "]"
            begin = end if closed else _skip_space(text, end + 1)
        around = _JSON.decode(f"{text[: opening.end()]}{text[begin:]}")
    except json.JSONDecodeError as error:
        # What stands around the list was decoded without the list, so only positions inside the list are of the file.
        line = error.lineno if error.doc is text else number
        broken.add(line, f"no valid JSON: {error.msg}.")
        return
    except RecursionError:
        broken.add(number, "no valid JSON: nested too deeply.")
        return
    if isinstance(around, dict) and around.get("data") != []:
        _refuse_json(path)


def _refuse_json(path: str) -> NoReturn:
    raise UserError(
        f'{path}: expected a list of objects, [{{...}}, {{...}}, ...], or {{"data": [...]}}; '
        "a file with one object a line is read when it is called .jsonl."
    )


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    return match.end() if match else position


def _record_rows(
    path: str,
    records: Iterator[tuple[int, object]],
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    broken: _BrokenLines,
) -> Iterator[Row]:
    """The wanted values of JSON objects; a key that an object lacks is null, as long as another object has it."""
    names = (*columns.values(), *optional.values())
    present: dict[str, None] = {}  # an ordered set, for the message
    for line, record in records:
        if not isinstance(record, dict):
            broken.add(line, f'holds {kind_of(record)}, expected an object such as {{"text": ..., "label": ...}}.')
            continue
        present.update(dict.fromkeys(record))
        values = [record.get(name) for name in names]
        wrong = next((name for name, value in zip(names, values, strict=True) if isinstance(value, dict | list)), None)
        if wrong is not None:
            broken.add(line, f"{wrong} holds {kind_of(record[wrong])}, expected text, a number or a boolean.")
        else:
            yield line, tuple(map(_json_text, values))
    if present:
        with broken.collecting():
            check_columns(path, present, columns)


def _json_text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if value is None else str(value)


def kind_of(value: object) -> str:
    """What a value of a row is, for a message; in json a number is a text."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", dict: "an object", list: "a list", str: "a text or a number"}
    return kinds.get(type(value), type(value).__name__)


def _parquet_batches(path: str, columns: Mapping[str, str], optional: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            check_columns(path, present, columns)
            names = {**columns, **{role: name for role, name in optional.items() if name in present}}
            first_row = 1
            for batch in file.iter_batches(_CHUNK_ROWS, columns=list(dict.fromkeys(names.values()))):
                yield text_batch(batch, names, list(optional), path, first_row)
                first_row += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]}).") from error


def _parquet_records(path: str) -> Iterator[Record]:
    try:
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_CHUNK_ROWS) for row in batch.to_pylist())
            yield from enumerate(rows, 1)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({str(error).splitlines()[0]}).") from error
