"""Read the rows of csv and tsv files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter

from indictune.data.bad_rows import BadRows
from indictune.data.columns import existing_columns
from indictune.data.text_lines import decoded_lines

_MANY_LINES = 100  # a stray quote may have joined the rows of more lines
_AROUND = '\ufeff" \t'  # around a name in a repeated header, if that file has a byte order mark

Cells = tuple[str | None, ...]


def delimited_rows(
    path: str, delimiter: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[tuple[int, Cells]]:
    """The first line of each row, and its cells of `columns`, then of `optional`.

    Raises:
        UserError: the header lacks a column.
    """
    row_lines: list[str] = []
    undecodable: list[tuple[int, str]] = []  # lines of the row, and the first byte of each that is not UTF-8
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 131,072 characters refuses long texts
    # Without strict=True, csv drops a stray quote from a text, or takes all rows up to the next one as one.
    reader = csv.reader(_recorded_lines(path, row_lines, undecodable), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        row_lines.clear()
        undecodable.clear()
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if not header or _may_hide_rows(row_lines):
                bad.stop(start, "row-unreadable", reason=error)
                return
            bad.add(start, "row-unreadable", "".join(row_lines), reason=error)
            continue
        if not fields:
            continue
        counts = {"fields": len(fields), "expected": len(header)}
        if not header:
            if undecodable:
                bad.stop(undecodable[0][0], "not-utf8", byte=undecodable[0][1])
                return
            header = [name.strip() for name in fields]
            pick = _picker(path, header, columns, optional)
        elif len(fields) != len(header) and len(row_lines) > 1:
            bad.stop(start, "row-of-many-lines", lines=len(row_lines), **counts)
            return
        elif undecodable:
            bad.add(undecodable[0][0], "not-utf8", "".join(row_lines), byte=undecodable[0][1])
        elif len(fields) != len(header):
            bad.add(start, "field-count", "".join(row_lines), **counts)
        elif _is_header(fields, header):
            bad.add(start, "header-repeated", "".join(row_lines))
        elif len(row_lines) > _MANY_LINES:
            bad.add(start, "row-too-long", "".join(row_lines), lines=len(row_lines))
        else:
            yield start, pick(fields)


def _recorded_lines(path: str, row_lines: list[str], undecodable: list[tuple[int, str]]) -> Iterator[str]:
    """Lines for a csv reader; the lists get the lines, and those that are not UTF-8."""
    for number, (line, byte) in enumerate(decoded_lines(path), 1):
        row_lines.append(line)
        if byte:
            undecodable.append((number, byte))
        yield line


def _may_hide_rows(lines: list[str]) -> bool:
    """Whether a row with a stray quote may have joined others, or left the next ones inside quotes."""
    return len(lines) > 1 or "".join(lines).count('"') % 2 == 1


def _is_header(fields: list[str], header: list[str]) -> bool:
    # The last field alone rules most rows out.
    return fields[-1].strip() == header[-1] and [name.strip(_AROUND) for name in fields] == header


def _picker(
    path: str, header: list[str], columns: Mapping[str, str], optional: Mapping[str, str]
) -> Callable[[list[str]], Cells]:
    """A function that takes the wanted cells out of a row with this header."""
    existing_columns(path, header, columns, optional)
    absent = len(header)  # index of an added None
    indices = [header.index(name) if name in header else absent for name in (*columns.values(), *optional.values())]
    take = itemgetter(*indices, absent)  # with one more, to get a tuple for a single column too
    return lambda fields: take([*fields, None])[:-1]
