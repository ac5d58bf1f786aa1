"""Rows of csv and tsv files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter

from indictune.data.bad_rows import BadRows
from indictune.data.columns import check_columns
from indictune.data.text_lines import decoded_lines

# A text of more lines is told to the user: it may be many rows that a stray quote has made one.
_MANY_LINES = 100

_HEADER = "this is the header again, as where files were put one behind the other; remove the line."
_AROUND = '\ufeff" \t'  # a name in it, where the file put behind the other has a byte order mark

Cells = tuple[str | None, ...]

_STRAY = "if it should not, a quote is opened in its first line that makes one row of all lines up to the next quote."


def delimited_rows(
    path: str, delimiter: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows
) -> Iterator[tuple[int, Cells]]:
    """The line on which each row begins, and its wanted cells: those of `columns`, then those of `optional`.

    Raises:
        UserError: the header cannot be read, or lacks a column.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 131,072 characters refuses long texts
    undecodable: dict[int, str] = {}
    read: list[str] = []  # the lines of the row

    def lines() -> Iterator[str]:
        for line in decoded_lines(path, undecodable):
            read.append(line)
            yield line

    def wrong(fields: list[str]) -> str | None:
        if len(fields) != len(header):
            return f"{_fields(len(fields))} where the header has {len(header)}; {_how_to_quote(delimiter)}"
        return _HEADER if _repeats(header, fields) else None

    # Without strict=True, a stray quote is dropped from a text, or swallows all rows up to the next one.
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    header: list[str] = []
    pick: Callable[[list[str]], Cells]
    while True:
        read.clear()
        undecodable.clear()
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"the row that begins here cannot be read ({error}); {_how_to_quote(delimiter)}"
            if not header or _may_hide_rows(read):
                bad.cannot_read(start, reason)
                return
            bad.add_broken(start, reason, "".join(read))
            continue
        if not fields:
            continue
        if undecodable and not header:
            bad.cannot_read(*undecodable.popitem())
            return
        if header and len(fields) != len(header) and len(read) > 1:
            bad.cannot_read(start, f"the row that begins here has {len(read):,} lines and {wrong(fields)}")
            return
        if undecodable:
            bad.add_broken(*next(iter(undecodable.items())), "".join(read))
        elif not header:
            header = [name.strip() for name in fields]
            pick = _picker(path, header, columns, optional)
        elif fault := wrong(fields):
            bad.add_broken(start, fault, "".join(read))
        else:
            if len(read) > _MANY_LINES:
                bad.remark(start, f"this row has {len(read):,} lines; {_STRAY}", f"over {_MANY_LINES} lines")
            yield start, pick(fields)


def _repeats(header: list[str], fields: list[str]) -> bool:
    """Whether a row is the header again; the last cell alone rules most rows out."""
    return fields[-1].strip() == header[-1] and [name.strip(_AROUND) for name in fields] == header


def _may_hide_rows(lines: list[str]) -> bool:
    """Whether a row with a stray quote may have swallowed others, or left the next ones inside quotes."""
    return len(lines) > 1 or "".join(lines).count('"') % 2 == 1


def _fields(count: int) -> str:
    return f"{count} field" if count == 1 else f"{count} fields"


def _how_to_quote(delimiter: str) -> str:
    what = "comma" if delimiter == "," else "tab"
    return f'a field that holds a {what}, a quote or a line break must be written "like this", with "" for a quote.'


def _picker(
    path: str, header: list[str], columns: Mapping[str, str], optional: Mapping[str, str]
) -> Callable[[list[str]], Cells]:
    """The function that takes the wanted cells out of a row with this header."""
    check_columns(path, header, {**columns, **{role: name for role, name in optional.items() if name in header}})
    absent = len(header)  # the cell behind the last one, which is None
    indices = [header.index(name) if name in header else absent for name in (*columns.values(), *optional.values())]
    take = itemgetter(*indices, absent)  # with one more, so that it returns a tuple for a single column too
    return lambda fields: take([*fields, None])[:-1]
