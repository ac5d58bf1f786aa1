"""Read data files strictly, json among them: each cell is the text in the file, with its line."""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.early_values import check_exists
from indictune.data.bad_rows import BadRows, Batches, Record, numbered_files
from indictune.data.cache import with_column
from indictune.data.columns import ON_OFF, Wanted, existing_columns, joined_list, shortened, usual_columns
from indictune.data.read.arrow_files import ARROW_EXTENSIONS, Classes, arrow_batches, arrow_records, with_class_names
from indictune.data.read.conll import TWEETS, holds_tweets, tweet_rows
from indictune.data.read.delimited import DELIMITERS, delimited_rows
from indictune.data.read.open_files import decoded_lines, opened
from indictune.data.read.sheets import SHEET_EXTENSIONS, sheet_rows
from indictune.errors import Problems, UserError, problem
from indictune.files import kind_of_file, known_digest

_LIST = re.compile(r'\s*(?:\{(?:[^\[]*,)?\s*"data"\s*:\s*)?\[[ \t\n\r]*')
_NEXT = re.compile(r"[ \t\n\r]*+(?:,[ \t\n\r]*+(?!\])|(?=\]))")  # after an element: another one, or the list's end
_BEGINNING_BYTES = 1 << 16

_Written = tuple[int, str, object]  # a value, with its line and as the file writes it


class _DuplicateKeyError(ValueError):
    """An object has a key twice. JSON decoders silently drop one of the two."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return made


# pandas writes NaN for a missing value.
DECODER = json.JSONDecoder(
    parse_float=str,
    parse_int=str,
    parse_constant=lambda name: None if name == "NaN" else name,
    object_pairs_hook=_object,
)
ERRORS = (ValueError, RecursionError)


def _beginning_of(path: str) -> str:
    """The first 64 KiB of a file, unpacked, without a byte order mark."""
    with opened(path) as file:
        return file.read(_BEGINNING_BYTES).removeprefix(codecs.BOM_UTF8).decode(errors="replace")


def _json_lines(path: str, bad: BadRows) -> Iterator[_Written]:
    """The values of a jsonl file; blank lines are skipped."""
    for number, (line, byte) in enumerate(decoded_lines(path), 1):
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
        elif not line.isspace():
            try:
                # Without its end, a line cut short breaks in its last column, not in "column 1" of a next line.
                value = DECODER.decode(line.rstrip("\r\n"))
            except ERRORS as error:
                code, details = _fault(error)
                bad.add(number, code, line, **details)
            else:
                yield number, line, value


def _json_elements(path: str, bad: BadRows) -> Iterator[_Written]:
    """The elements of a JSON list; raises `UserError` without one. Memory holds the text, not all elements."""
    with opened(path) as file:
        content = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        bad.stop(line, "not-utf8", byte=f"0x{content[error.start]:02x}")
        return
    opening = _LIST.match(text)
    if opening is None:
        raise UserError("json-list-missing", value=path)
    number, counted, begin = 1, 0, opening.end()
    try:
        while text[begin : begin + 1] != "]":
            number, counted = number + text.count("\n", counted, begin), begin
            value, end = DECODER.raw_decode(text, begin)
            yield number, text[begin:end], value
            following = _NEXT.match(text, end)
            if following is None:
                raise json.JSONDecodeError("Expecting ',' and an element, or ']'", text, end)
            begin = following.end()
        around = DECODER.decode(f"{text[: opening.end()]}{text[begin:]}")
    except ERRORS as error:
        # The text around the list was decoded without the list: its positions are not those of the file.
        if isinstance(error, json.JSONDecodeError) and error.doc is text:
            number = error.lineno
        code, details = _fault(error)
        bad.stop(number, code, **details)
        return
    if isinstance(around, dict) and around.get("data") != []:
        raise UserError("json-list-missing", value=path)


def _record_rows(path: str, records: Iterator[tuple[int, object]], wanted: Wanted, bad: BadRows) -> Iterator[Row]:
    """The wanted values of JSON objects, with their lines.

    A key that an object lacks is null, if another object has it. The first object decides which keys stand for absent
    ones by their usual names.
    """
    roles = wanted.roles
    guessed: dict[str, str] | None = None
    present: dict[str, object] = {}  # the last value of each key, for the message
    for line, record in records:
        if not isinstance(record, dict):
            bad.add(line, "not-an-object", record, held=kind_of(record))
            continue
        if guessed is None:
            guessed = usual_columns(list(record), roles)
            roles |= guessed
        present.update(record)
        given = ((role, record.get(name)) for role, name in roles.items())
        values = [joined_list(value) if role in wanted.lists else value for role, value in given]
        nested = [name for name, value in zip(roles.values(), values, strict=True) if isinstance(value, dict | list)]
        if nested:
            held, expected = kind_of(record[nested[0]]), "text, a number or a boolean"
            expected += ", or --problem_type multi_label_classification" if nested[0] == roles.get("label") else ""
            bad.add(line, "value-of-wrong-type", record, where=nested[0], held=held, expected=expected)
        else:
            yield line, tuple(map(_text, values))
    if present:
        with bad.problems.collecting():
            flags = [name for name, value in present.items() if str(value).lower() in ON_OFF]
            found = existing_columns(path, list(present), wanted, bad, flags)
            for role in (guessed or {}).keys() - {role for role in found if found[role] == roles[role]}:
                raise UserError("columns-unclear", value=path, column=found[role], other=roles[role], role=role)


def kind_of(value: object) -> str:
    """The kind of a value, for a message; in json a number is a text."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", dict: "an object", list: "a list", str: "a text or a number"}
    return kinds.get(type(value), type(value).__name__)


def _fault(error: Exception) -> tuple[str, dict[str, Any]]:
    """Code and details of the problem of a value that cannot be decoded."""
    if isinstance(error, _DuplicateKeyError):
        return "key-duplicate", {"key": shortened(ascii(error.args[0]))}
    where = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
    return "invalid-json", {"reason": where}


def _without_half_emoji(values: Iterable[_Written], bad: BadRows) -> Iterator[tuple[int, object]]:
    """The values without half of a surrogate pair, which no text can hold: a tweet cut inside an emoji."""
    for number, written, value in values:
        if r"\ud" in written.lower() and re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
            bad.add(number, "half-emoji", value)
        else:
            yield number, value


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if value is None else str(value)


_COLUMN = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*[\[{]')  # an object that begins with a list or an object


def _json_by_columns(path: str) -> Iterator[_Written] | None:
    """The rows, numbered from 1; None if the file does not hold columns of one length. Memory holds the whole file."""
    beginning = _beginning_of(path)
    if _COLUMN.match(beginning) is None or _LIST.match(beginning):
        return None
    with opened(path) as file:
        content = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = content.decode()
        columns = DECODER.decode(text)
    except ERRORS:  # objects on lines, or a broken file, which reading them reports
        return None
    kinds = {type(column) for column in columns.values()}
    lengths = {len(column) for column in columns.values() if isinstance(column, dict | list)}
    if kinds not in ({dict}, {list}) or len(lengths) != 1:
        return None
    first = next(iter(columns.values()))
    keys = first if isinstance(first, dict) else range(len(first))
    cells = {name: column.get if isinstance(column, dict) else column.__getitem__ for name, column in columns.items()}
    rows = ({name: cell(key) for name, cell in cells.items()} for key in keys)
    written = r"\ud" if r"\ud" in text.lower() else ""
    return ((number, written, row) for number, row in enumerate(rows, 1))


RECORD_EXTENSIONS = (".json", ".jsonl", ".ndjson", *ARROW_EXTENSIONS)
EXTENSIONS = (*DELIMITERS, *RECORD_EXTENSIONS, *SHEET_EXTENSIONS)
# Rows held as Python objects before they become arrow arrays. This bounds the memory.
CHUNK_ROWS = 20_000
_FIRST_ROWS = 1_000

Each = TypeVar("Each")
Row = tuple[int, tuple[str | None, ...]]

ReadRecords = Callable[[str, BadRows], Iterator[Record]]


def read_batches(path: str, wanted: Wanted, bad: BadRows) -> Batches:
    """Read the wanted columns of a file, some thousand rows at a time. A file with `.gz` or `.zst` is unpacked.

    csv and tsv: one header line, quotes doubled inside quotes, as pandas and spreadsheets write them. jsonl: one
    object a line. json: the same, or a list of objects, an object with such a list as `data`, or the columns as pandas
    writes them. All of them in UTF-8, with or without a byte order mark; blank lines are skipped. Numbers and booleans
    arrive as the text they are written as. parquet and arrow: class ids become the names that the file declares.
    xlsx and ods: the first sheet. txt and conll: the tweets of SentiMix. `bad` gets the rows that cannot be read.

    Yields:
        A nullable string column for each role, and `line` (int64): the first line of the row in the file, from 1; in
        other files the number of the row. At least one batch, unless all rows are bad.

    Raises:
        UserError: the file or a column is missing, the file holds no rows or cannot be read as its extension says.
    """
    is_of_tweets = kind_of_file(path) in TWEETS and checked_extension(path) and holds_tweets(path)
    extension = checked_extension(path, () if is_of_tweets else EXTENSIONS)
    has_no_layout, has_sheets = extension in RECORD_EXTENSIONS, extension in SHEET_EXTENSIONS
    ignored = [name for name in wanted.given_layout() if has_no_layout or (name == "sheet" and not has_sheets)]
    if ignored:
        bad.remark(f"{path}: ignoring {', '.join(f'--{name}' for name in ignored)}: not for this kind of file.")
    if is_of_tweets:
        batches = string_batches(tweet_rows(path, wanted, bad), wanted.roles)
    elif extension in ARROW_EXTENSIONS:
        batches = arrow_batches(path, wanted, bad, CHUNK_ROWS)
    elif extension in DELIMITERS:
        batches = string_batches(delimited_rows(path, wanted, bad), wanted.roles)
    elif extension in SHEET_EXTENSIONS:
        batches = string_batches(sheet_rows(path, wanted, bad), wanted.roles)
    else:
        values = _json_by_columns(path) if extension == ".json" else None
        records = _without_half_emoji(values or _json_values(path, extension, bad), bad)
        batches = string_batches(_record_rows(path, records, wanted, bad), wanted.roles)
    yield from checked_rows(path, batches, bad)


def holds_lists(path: str, label: str) -> bool:
    """Whether the first rows of a json, parquet or arrow file all have lists in the column of the label."""
    extension = checked_extension(path)
    records: Iterator[Any] = iter(())
    if extension in ARROW_EXTENSIONS:
        records = (record for _, record in arrow_records(path, _FIRST_ROWS))
    elif extension in RECORD_EXTENSIONS:
        values = _json_by_columns(path) if extension == ".json" else None
        records = (value for _, _, value in values or _json_values(path, extension, BadRows(path)))
    first = [each for each in itertools.islice(records, _FIRST_ROWS) if isinstance(each, dict)]
    name = usual_columns(list(first[0]), {"label": label}).get("label", label) if first else label
    given = [each[name] for each in first if each.get(name) is not None]
    return given != [] and all(isinstance(each, list) for each in given)


def read_records(path: str, bad: BadRows) -> Iterator[Record]:
    """The rows of a json, jsonl, parquet or arrow file, with lists and objects, and their lines as of `read_batches`.

    In json and jsonl a number is the text it is written as. `bad` gets the unreadable rows. Raises `UserError` if the
    file is missing, holds no rows or cannot be read as its extension says.
    """
    extension = checked_extension(path, RECORD_EXTENSIONS)
    records: Iterator[tuple[int, object]]
    if extension in ARROW_EXTENSIONS:
        records = arrow_records(path, CHUNK_ROWS)
    else:
        records = _without_half_emoji(_json_values(path, extension, bad), bad)
    for line, record in checked_rows(path, records, bad):
        if isinstance(record, dict):
            yield line, record
        else:
            bad.add(line, "not-an-object", record, held=kind_of(record))


def checked_rows(path: str, items: Iterator[Each], bad: BadRows) -> Iterator[Each]:
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
    """The extension of a file, one of `extensions` if there are any; `UserError` if it cannot be opened and read."""
    file = Path(path)
    extension = kind_of_file(path)
    if extensions and extension not in extensions:
        raise UserError("file-kind-unknown", value=path, expected=", ".join(extensions))
    check_exists(path)
    try:
        file.open("rb").close()
    except OSError as error:
        raise UserError("unreadable", value=path, reason=error.strerror) from error
    return extension


def _json_values(path: str, extension: str, bad: BadRows) -> Iterator[_Written]:
    beginning = _beginning_of(path)
    is_object = beginning.lstrip().startswith("{") and not (extension == ".json" and _LIST.match(beginning))
    leaves_lines_out = bad.skips_damage and extension != ".json"
    if is_object and not leaves_lines_out and (lines := _lines_of_object(path, beginning)) > 1:
        raise UserError("json-object-on-lines", value=path, lines=lines)
    if is_object or extension != ".json":  # lines, as `datasets` and pandas write them
        return _json_lines(path, bad)
    return _json_elements(path, bad)


def _lines_of_object(path: str, beginning: str) -> int:
    """How many lines the first object of a file stands on; 1 if it is none."""
    if beginning.lstrip().partition("\n")[0].rstrip().endswith("}"):
        return 1
    with opened(path) as file:
        text = file.read().removeprefix(codecs.BOM_UTF8).decode(errors="replace").lstrip()
    with suppress(*ERRORS):
        return 1 + text.count("\n", 0, DECODER.raw_decode(text)[1])
    return 1


def string_batches(rows: Iterator[Row], names: Collection[str], rows_at_once: int = CHUNK_ROWS) -> Batches:
    """Rows in the form of `read_batches`; `names` are those of their cells."""
    while chunk := list(itertools.islice(rows, rows_at_once)):
        arrays = [pa.array([cells[index] for _, cells in chunk], pa.string()) for index in range(len(names))]
        lines = pa.array([line for line, _ in chunk], pa.int64())
        yield pa.record_batch([*arrays, lines], names=[*names, "line"])


@dataclass(frozen=True)
class SplitFiles:
    """A split of files, which we read.

    `datasets` 5 changes what csv and json files hold. For csv files it calls pandas. Pandas takes the first field for
    an index where rows have more fields than the header, and "NA" and "None" for missing texts. Where one json row of
    thousands has a number or a list for a text, `datasets` writes all texts of the column as JSON, in quotes. It
    writes 1e5 as 100000, and silently drops one of two equal keys.

    `class_names` are those that the dataset's README.md declares.
    """

    files: tuple[str, ...]
    split: str = ""
    class_names: Classes = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Digest of the content."""
        return repr([self.class_names, *((file, known_digest(file)) for file in self.files)])

    def batches(self, wanted: Wanted, bad: BadRows) -> Batches:
        """The rows of all files in the form of `read_batches`; class ids become names."""
        rows = self._batches(wanted, bad)
        if not self.class_names:
            return rows
        return with_class_names(rows, wanted.roles, self.class_names, self.split, bad, may_be_names=True)

    def records(self, bad: BadRows, read: ReadRecords = read_records) -> Iterator[Record]:
        """The rows of all files in the form of `read_records`."""
        for file, offset in numbered_files(self.files, bad):
            for line, record in read(file, bad):
                yield offset + line, record

    def _batches(self, wanted: Wanted, bad: BadRows) -> Batches:
        problems = Problems()
        for file, offset in numbered_files(self.files, bad):
            with problems.collecting():
                for batch in read_batches(file, wanted, bad):
                    yield with_column(batch, "line", pc.add(batch["line"], offset)) if offset else batch
        missing = [str(each.value) for each in problems if each.code == "column-missing"]
        if missing and (others := {*self.files} - {str(each.value) for each in problems}):
            problems.append(problem("files-differ", value=missing[0], other=min(others)))
        problems.raise_any()
