"""Read the rows of csv and tsv files."""

from __future__ import annotations

import csv
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

from indictune.data.bad_rows import BadRows
from indictune.data.file_form import FileForm, delimiter_of, first_rows
from indictune.data.headers import columns_of_header, without_given_names
from indictune.data.text_lines import decoded_lines

_MANY_LINES = 100  # a stray quote may have joined the rows of more lines
_WHOLE_ROWS = 2  # behind damaged lines, where reading starts again
_AROUND = '\ufeff" \t'  # around a name in a repeated header, if that file has a byte order mark

Cells = tuple[str | None, ...]
Line = tuple[int, tuple[str, str]]  # its number, the line, and its first byte that is not UTF-8


def delimited_rows(
    path: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows, form: FileForm
) -> Iterator[tuple[int, Cells]]:
    """The first line of each row, and its cells of `columns`, then of `optional`.

    Raises:
        UserError: the header lacks a column, or the form's column names do not fit.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 131,072 characters refuses long texts
    delimiter = delimiter_of(path, form, columns, bad)
    sample = first_rows(path, delimiter, form)
    form = without_given_names(path, sample, form, columns, bad)

    def picker(header: Sequence[str]) -> Callable[[list[str]], Cells]:
        names = columns_of_header(path, header, sample, form, columns, optional, bad)
        return cells_of(header, [names.get(role) for role in (*columns, *optional)])

    rows = _Rows(path, {"delimiter": delimiter, **form.reading})
    header = list(form.column_names)
    pick = picker(header) if header else tuple
    for fields in rows:
        if fields and len(fields) == len(header) and not rows.are_unusual and fields[-1].strip() != header[-1]:
            yield rows.start, pick(fields)
        elif not fields and rows.error is None:
            continue
        elif not header and rows.error is None and not rows.undecodable:
            header = [name.strip() for name in fields]
            pick = picker(header)
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


def cells_of(header: Sequence[str], names: Sequence[str | None]) -> Callable[[Sequence[str | None]], Cells]:
    """A function that takes the named cells out of a row with this header, and None for a name that is None."""
    indices = [len(header) if name is None else header.index(name) for name in names]
    take = itemgetter(*indices, len(header))  # with one more, to get a tuple for a single column too
    return lambda fields: take([*fields, None])[:-1]


class _Rows:
    """The rows of a file: the fields of each, none for a blank line or an error.

    Attributes:
        start: number of the row's first line.
        lines: of the row.
        undecodable: number and first wrong byte of each line of the row that is not UTF-8.
        error: why the row cannot be read, or None.
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.start = 1
        self.lines: list[str] = []
        self.undecodable: list[tuple[int, str]] = []
        self.error: csv.Error | None = None
        self._options = options
        self._ahead: deque[Line] = deque()  # lines that were read, and are read again
        self._all: Iterator[Line] = enumerate(decoded_lines(path), 1)
        self._reader = csv.reader(self._recorded(self._all), **options)

    @property
    def are_unusual(self) -> bool:
        """Whether the row has several lines, or bytes that are no text."""
        return len(self.lines) > 1 or bool(self.undecodable)

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
        self._reader = csv.reader(self._recorded(chain(_drained(self._ahead), self._all)), **self._options)

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

    def _recorded(self, lines: Iterator[Line]) -> Iterator[str]:
        """Lines for the csv reader. They are those of the row until the next one begins."""
        keep, wrong = self.lines.append, self.undecodable.append
        for number, (line, byte) in lines:
            keep(line)
            if byte:
                wrong((number, byte))
            yield line


def _drained(lines: deque[Line]) -> Iterator[Line]:
    """Take lines out, one by one."""
    while lines:
        yield lines.popleft()


class _Fault(NamedTuple):
    """What is wrong with a row; `hides_rows` if it may have joined others, or left the next ones inside quotes."""

    line: int
    code: str
    details: dict[str, Any]
    hides_rows: bool = False


def _fault(rows: _Rows, fields: Sequence[str], header: Sequence[str]) -> _Fault | None:
    """What is wrong with a row, or None."""
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
