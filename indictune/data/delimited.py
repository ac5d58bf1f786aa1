"""Read the rows of csv and tsv files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from indictune.data.bad_rows import BadRows
from indictune.data.columns import Fault, check_columns
from indictune.data.text_lines import decoded_lines

# A longer text is reported: a stray quote may have joined many rows.
_MANY_LINES = 100

_AROUND = '\ufeff" \t'  # around a name in a repeated header, if that file has a byte order mark

Cells = tuple[str | None, ...]

_STRAY = "if it should not, a quote is opened in its first line that makes one row of all lines up to the next quote."


def delimited_rows(
    path: str, delimiter: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[tuple[int, Cells]]:
    """The first line of each row, and its cells of `columns`, then of `optional`.

    Raises:
        UserError: the header cannot be read, or lacks a column.
    """
    undecodable: dict[int, str] = {}
    row_lines: list[str] = []

    def lines() -> Iterator[str]:
        for line in decoded_lines(path, undecodable):
            row_lines.append(line)
            yield line

    reader = _strict_reader(lines(), delimiter)
    header: list[str] = []
    pick: Callable[[list[str]], Cells]
    while True:
        row_lines.clear()
        undecodable.clear()
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            details: dict[str, Any] = {"reason": error, "quoting": _how_to_quote(delimiter)}
            if header and not _may_hide_rows(row_lines):
                bad.add_broken(start, "row-unreadable", "".join(row_lines), **details)
                continue
            bad.cannot_read(start, "row-unreadable", **details)
            return
        if not fields:
            continue
        if not header:
            if undecodable:
                line, byte = undecodable.popitem()
                bad.cannot_read(line, "not-utf8", where="", byte=byte)
                return
            header = [name.strip() for name in fields]
            pick = _picker(path, header, columns, optional)
        elif len(fields) != len(header) and len(row_lines) > 1:
            counts = _wrong_count(fields, header, delimiter)[1]
            bad.cannot_read(start, "row-of-many-lines", lines=len(row_lines), **counts)
            return
        elif undecodable:
            line, byte = next(iter(undecodable.items()))
            bad.add_broken(line, "not-utf8", "".join(row_lines), where="", byte=byte)
        elif fault := _fault(fields, header, delimiter):
            bad.add_broken(start, fault[0], "".join(row_lines), **fault[1])
        else:
            if len(row_lines) > _MANY_LINES:
                bad.remark(start, f"this row has {len(row_lines):,} lines; {_STRAY}", f"over {_MANY_LINES} lines")
            yield start, pick(fields)


def _strict_reader(lines: Iterator[str], delimiter: str) -> Any:
    """A `csv.reader` that refuses stray quotes and takes long texts."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 131,072 characters refuses long texts
    # Without strict=True, csv drops a stray quote from a text, or takes all rows up to the next one as one.
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _fault(fields: list[str], header: list[str], delimiter: str) -> Fault | None:
    if len(fields) != len(header):
        return _wrong_count(fields, header, delimiter)
    # The last cell alone rules most rows out.
    repeats = fields[-1].strip() == header[-1] and [name.strip(_AROUND) for name in fields] == header
    return ("header-repeated", {}) if repeats else None


def _wrong_count(fields: list[str], header: list[str], delimiter: str) -> Fault:
    count = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
    return "field-count", {"fields": count, "expected": len(header), "quoting": _how_to_quote(delimiter)}


def _may_hide_rows(lines: list[str]) -> bool:
    """Whether a row with a stray quote may have joined others, or left the next ones inside quotes."""
    return len(lines) > 1 or "".join(lines).count('"') % 2 == 1


def _how_to_quote(delimiter: str) -> str:
    name = "comma" if delimiter == "," else "tab"
    return f'Write a field that holds a {name}, a quote or a line break "like this", with "" for a quote.'


def _picker(
    path: str, header: list[str], columns: Mapping[str, str], optional: Mapping[str, str]
) -> Callable[[list[str]], Cells]:
    """A function that takes the wanted cells out of a row with this header."""
    check_columns(path, header, {**columns, **{role: name for role, name in optional.items() if name in header}})
    absent = len(header)  # index of an added None
    indices = [header.index(name) if name in header else absent for name in (*columns.values(), *optional.values())]
    take = itemgetter(*indices, absent)  # with one more, to get a tuple for a single column too
    return lambda fields: take([*fields, None])[:-1]
