"""Read the rows of csv and tsv files by the columns of their header."""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from indictune.data.bad_rows import BadRows
from indictune.data.columns import ON_OFF, Wanted, existing_columns, shortened, usual_columns
from indictune.data.read.open_files import decoded_lines, opened
from indictune.errors import UserError
from indictune.files import kind_of_file

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_CHARACTERS = {",": ",", ";": ";", "tab": "\t", "|": "|"}  # of `--delimiter`
_SAMPLE_BYTES = 1 << 16
SAMPLE_ROWS = 20
_LONG_NAME = 30
_EXCELS_LINE = re.compile(r"\ufeff?sep=(.)\r?\n")  # the first line of a file may name the delimiter for Excel
_MANY_WORDS = 4

Cells = tuple[str | None, ...]


def _first_rows(path: str, wanted: Wanted, bad: BadRows) -> tuple[str, list[list[str]]]:
    """The delimiter of a file, and its first few rows that are not blank; bytes that are no text are replaced.

    For `--delimiter auto`, it is that of the extension or of Excel's first line, unless the required columns come out
    with another one alone; `bad` gets a remark then. Without a header, most rows must have as many fields as there are
    column names; without those, two or more, all as many.
    """
    if wanted.delimiter != "auto":
        only = _CHARACTERS[wanted.delimiter]
        return only, _split_rows(path, only, wanted)
    excels = _EXCELS_LINE.match(next(decoded_lines(path), ("", ""))[0])
    own = excels[1] if excels else DELIMITERS[kind_of_file(path)]
    samples = {own: _split_rows(path, own, wanted)}
    if wanted.column_names or not _fitting(samples[own], wanted):
        samples |= {each: _split_rows(path, each, wanted) for each in _CHARACTERS.values() if each != own}
    fitting = {each: _fitting(rows, wanted) for each, rows in samples.items()}
    best = max(fitting, key=lambda each: fitting[each])
    if not fitting[best]:
        best = next((each for each, rows in samples.items() if len({*map(len, rows)}) == 1 and rows[0][1:]), own)
    if best != own:
        name = next(name for name, each in _CHARACTERS.items() if each == best)
        bad.remark(f"{path}: its columns are separated by {name} (--delimiter).")
    return best, samples[best]


def _split_rows(path: str, delimiter: str, wanted: Wanted) -> list[list[str]]:
    with opened(path) as file:
        lines = file.read(_SAMPLE_BYTES).decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    if lines and _EXCELS_LINE.match(lines[0]):
        del lines[0]
    rows: list[list[str]] = []
    with suppress(csv.Error):  # of a broken row, or of one that the sample cuts
        rows.extend(islice(filter(None, csv.reader(lines, delimiter=delimiter, **wanted.reading)), SAMPLE_ROWS))
    return rows


def _fitting(rows: Sequence[Sequence[str]], wanted: Wanted) -> int:
    """How many of the first rows have the wanted fields."""
    if names := wanted.column_names:
        return sum(len(row) == len(names) for row in rows)
    return len(rows) * _has_columns(rows[0] if rows else (), wanted)


def _has_columns(header: Sequence[str], wanted: Wanted) -> bool:
    """Whether a header has all required columns, by their own names or by usual ones."""
    names = [name.strip() for name in header]
    usual = usual_columns(names, wanted.required)
    return all(name in names or role in usual for role, name in wanted.required.items())


def without_given_names(path: str, sample: Sequence[Sequence[str]], wanted: Wanted, bad: BadRows) -> Wanted:
    """What is wanted, without `--column_names` if the first row of the file has the required columns itself."""
    if not wanted.column_names or not sample or not _has_columns(sample[0], wanted):
        return wanted
    bad.remark(f"{path}: its first row has the column names, and --column_names is for files without.")
    return replace(wanted, column_names=())


def cell_picker(
    path: str, header: Sequence[str], sample: Sequence[Sequence[str]], wanted: Wanted, bad: BadRows
) -> Callable[[Sequence[str | None]], Cells]:
    """A function that takes the wanted cells out of a row, and None for a column that the file lacks.

    Args:
        header: the column names, given ones included.
        sample: the first few rows, that of the header included.

    Raises:
        UserError: a column is missing, the first row is no header, or the names or the delimiter do not fit the rows.
    """
    columns = [*wanted.required.values()]
    shown = ", ".join(map(shortened, sample[0])) if sample else ""
    is_single = max(map(len, sample), default=0) == 1 and wanted.delimiter != "auto"
    if is_single and (wanted.column_names[1:] or not {*columns} & {*header}):
        raise UserError("one-column", "", path, delimiter=wanted.delimiter, columns=shown)
    if wanted.column_names and sample and len(sample[0]) != len(header):
        raise UserError("column-names-count", "", path, count=len(header), fields=len(sample[0]), columns=shown)
    try:
        of_names = zip(*(row for row in sample if len(row) == len(header)), strict=True)
        flags = [name.strip() for name, *cells in of_names if cells[1:] and {*map(str.lower, cells)} <= ON_OFF.keys()]
        names = existing_columns(path, header, wanted, bad, flags)
    except UserError as error:
        is_missing = any(each.code == "column-missing" for each in error.problems)
        if wanted.column_names or not is_missing or not _looks_like_data(sample):
            raise
        likely = ",".join(_likely_names(sample, columns))
        raise UserError("header-missing", "", path, columns=shown, names=likely) from error
    indices = [header.index(names[role]) if role in names else len(header) for role in wanted.roles]
    take = itemgetter(*indices, len(header))  # with one more, to get a tuple for a single column too
    return lambda fields: take([*fields, None])[:-1]


def _looks_like_data(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row holds a long text or a number, or what other rows have in that column too."""
    header, *others = [[field.strip() for field in row] for row in rows]
    repeated = any(name and name in {row[index] for row in others if row[index:]} for index, name in enumerate(header))
    are_long = (len(name) > _LONG_NAME or len(name.split()) >= _MANY_WORDS for name in header)
    return repeated or any(are_long) or any(name.removeprefix("-").isdecimal() for name in header)


def _likely_names(rows: Sequence[Sequence[str]], wanted: Sequence[str]) -> list[str]:
    """A name for each column: the first of `wanted` for the longest fields, the second for the least varied others."""
    fields = [*zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)]
    names = [f"column{number}" for number in range(1, len(fields) + 1)]
    longest = max(range(len(fields)), key=lambda index: sum(map(len, fields[index])))
    # A delimiter at the end of each line makes an empty column.
    rest = set(range(len(fields))) - {longest}
    others = sorted(rest, key=lambda index: (not any(fields[index]), len(set(fields[index]))))
    for index, name in zip([longest, *others], wanted, strict=False):
        names[index] = name
    return names


_MANY_LINES = 100  # a stray quote may have joined the rows of more lines
_WHOLE_ROWS = 2  # behind damaged lines, where reading starts again
_AROUND = '\ufeff" \t'  # around a name in a repeated header, if that file has a byte order mark

Line = tuple[int, tuple[str, str]]  # its number, the line, and its first byte that is not UTF-8


def delimited_rows(path: str, wanted: Wanted, bad: BadRows) -> Iterator[tuple[int, Cells]]:
    """The first line of each row, and its cells of all wanted columns; raises `UserError` as `cell_picker`."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 131,072 characters refuses long texts
    delimiter, sample = _first_rows(path, wanted, bad)
    wanted = without_given_names(path, sample, wanted, bad)
    rows = _Rows(path, {"delimiter": delimiter, **wanted.reading})
    header = list(wanted.column_names)
    pick = cell_picker(path, header, sample, wanted, bad) if header else tuple
    for fields in rows:
        is_plain = len(rows.lines) == 1 and not rows.undecodable
        if rows.start == 1 and _EXCELS_LINE.match(rows.lines[0]):
            continue
        if fields and len(fields) == len(header) and is_plain and fields[-1].strip() != header[-1]:
            yield rows.start, pick(fields)
        elif not fields and rows.error is None:
            continue
        elif not header and rows.error is None and not rows.undecodable:
            header = [name.strip() for name in fields]
            pick = cell_picker(path, header, sample, wanted, bad)
        elif (fault := _fault(rows, fields, header)) is None:
            yield rows.start, pick(fields)
        elif header and not fault.hides_rows:
            bad.add(fault.line, fault.code, "".join(rows.lines), **fault.details)
        elif header and bad.skips_damage:
            rows.skip_damage(len(header))
            for number, line in enumerate(rows.lines, rows.start):
                bad.add(number, fault.code, line, **fault.details)
        else:
            bad.stop(fault.line, fault.code, **fault.details)
            return


class _Rows:
    """The rows of a file: the fields of each, none for a blank line or an error."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.start = 1  # of the row's lines
        self.lines: list[str] = []
        self.undecodable: list[tuple[int, str]] = []  # lines that are not UTF-8, and the first wrong byte of each
        self.error: csv.Error | None = None
        self._options = options
        self._ahead: deque[Line] = deque()  # lines that were read, and are read again
        self._all: Iterator[Line] = enumerate(decoded_lines(path), 1)
        self._reader = csv.reader(self._recorded(), **options)

    def __iter__(self) -> Iterator[list[str]]:
        while True:
            self.start += len(self.lines)
            self.lines.clear()
            self.undecodable.clear()
            self.error = None
            try:
                fields = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                self.error, fields = error, []
            yield fields

    def skip_damage(self, fields: int) -> None:
        """Make the fewest lines behind which whole rows follow, of so many fields, this row; go on behind them.

        It keeps its lines if no such rows follow soon.
        """
        wrong, many = dict(self.undecodable), len(self.lines)
        numbered = enumerate(self.lines, self.start)
        self._ahead.extendleft(reversed([(number, (line, wrong.get(number, ""))) for number, line in numbered]))
        self._ahead.extend(islice(self._all, _MANY_LINES))
        texts = [line for _, (line, _) in self._ahead]
        are_whole = (self._are_whole(texts[count : count + _MANY_LINES], fields) for count in range(1, len(texts)))
        count = next((count for count, is_whole in enumerate(are_whole, 1) if is_whole), many)
        self.lines[:] = [self._ahead.popleft()[1][0] for _ in range(count)]
        self._reader = csv.reader(self._recorded(), **self._options)

    def _are_whole(self, lines: Sequence[str], fields: int) -> bool:
        """Whether the first rows of these lines have so many fields, and no quote too many."""
        reader, begun, found = csv.reader(lines, **self._options), 0, 0
        try:
            for row in reader:
                if row and (len(row) != fields or "".join(lines[begun : reader.line_num]).count('"') % 2):
                    return False
                begun, found = reader.line_num, found + bool(row)
                if found == _WHOLE_ROWS:
                    return True
        except csv.Error:
            return False
        return True

    def _recorded(self) -> Iterator[str]:
        """Lines for the csv reader. They are those of the row until the next one begins."""
        while (numbered := self._ahead.popleft() if self._ahead else next(self._all, None)) is not None:
            number, (line, byte) = numbered
            self.lines.append(line)
            if byte:
                self.undecodable.append((number, byte))
            yield line


class _Fault(NamedTuple):
    """What is wrong with a row; `hides_rows` if it may have joined others, or left the next ones inside quotes."""

    line: int
    code: str
    details: dict[str, Any]
    hides_rows: bool = False


def _fault(rows: _Rows, fields: Sequence[str], header: Sequence[str]) -> _Fault | None:
    counts = {"fields": len(fields), "expected": len(header)}
    if rows.error is not None:
        hides_rows = len(rows.lines) > 1 or "".join(rows.lines).count('"') % 2 == 1
        return _Fault(rows.start, "row-unreadable", {"reason": rows.error}, hides_rows)
    if not header:
        return _Fault(rows.undecodable[0][0], "not-utf8", {"byte": rows.undecodable[0][1]}, True)
    if len(fields) != len(header) and len(rows.lines) > 1:
        return _Fault(rows.start, "row-of-many-lines", {"lines": len(rows.lines), **counts}, True)
    if rows.undecodable:
        return _Fault(rows.undecodable[0][0], "not-utf8", {"byte": rows.undecodable[0][1]})
    if len(fields) != len(header):
        return _Fault(rows.start, "field-count", counts)
    if [name.strip(_AROUND) for name in fields] == header:
        return _Fault(rows.start, "header-repeated", {})
    if len(rows.lines) > _MANY_LINES:
        return _Fault(rows.start, "row-too-long", {"lines": len(rows.lines)}, True)
    return None
