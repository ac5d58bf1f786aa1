"""Read the rows of the first sheet of xlsx and ods files."""

from __future__ import annotations

import functools
import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import python_calamine

from indictune.data.bad_rows import BadRows
from indictune.data.delimited import Cells, cells_of
from indictune.data.file_form import SAMPLE_ROWS, FileForm
from indictune.data.headers import columns_of_header, without_given_names
from indictune.data.packed_files import PACKED, opened, unpacked_limit
from indictune.errors import UserError

_MAX_CELLS = 100_000_000
_LAST_BYTES = 1 << 20  # of a sheet, with its last row
SHEET_EXTENSIONS = (".xlsx", ".ods")
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # Excel keeps a workbook with a password in such a file, and no zip


def sheet_rows(
    path: str, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows, form: FileForm
) -> Iterator[tuple[int, Cells]]:
    """The number of each row that is not empty, as the spreadsheet shows it, and its cells as of `delimited_rows`.

    Memory holds the whole sheet.

    Raises:
        UserError: the file has a password, is damaged or too large, or the header lacks a column.
    """
    with opened(path) as file:
        content = io.BytesIO(file.read())
    if content.getbuffer()[: len(_OLE)] == _OLE:
        raise UserError("sheet-protected", value=path)
    with _sheet_errors(path):
        _check_size(path, content)
        # By its path, python-calamine (0.9) knows an ods file with a password.
        book = python_calamine.load_workbook(content if path.lower().endswith(PACKED) else path)
        if len(book.sheet_names) > 1:
            bad.remark(f"{path}: reading its first sheet, {book.sheet_names[0]}, of {len(book.sheet_names)}.")
        sheet = book.get_sheet_by_index(0)
    texts = ((number, [_text(value) for value in row]) for number, row in enumerate(sheet.iter_rows(), 1))
    rows = ((number, row) for number, row in texts if any(row))
    first = list(islice(rows, SAMPLE_ROWS))
    if not first:
        return
    sample = [[field or "" for field in row] for _, row in first]
    form = without_given_names(path, sample, form, columns, bad)
    header = list(form.column_names) or [name.strip() for name in sample[0]]
    names = columns_of_header(path, header, sample, replace(form, delimiter="auto"), columns, optional, bad)
    pick = cells_of(header, [names.get(role) for role in (*columns, *optional)])
    for number, row in chain(first if form.column_names else first[1:], rows):
        yield number, pick(row)


@contextmanager
def _sheet_errors(path: str) -> Iterator[None]:
    try:
        yield
    except python_calamine.PasswordError as error:
        raise UserError("sheet-protected", value=path) from error
    except (python_calamine.CalamineError, zipfile.BadZipFile, zlib.error, OSError, RuntimeError) as error:
        raise UserError("sheet-damaged", value=path, reason=error) from error


def _check_size(path: str, content: io.BytesIO) -> None:
    """Refuse an archive that unpacks to more than the limit, or is damaged.

    python-calamine (0.9) takes memory for all cells up to the last row and column. If there is too little, it aborts
    the process.
    """
    limit = unpacked_limit(path)
    with zipfile.ZipFile(content) as archive:
        if sum(each.file_size for each in archive.infolist()) > limit:
            raise UserError("unpacked-too-large", value=path, limit=limit)
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"its part {damaged} is damaged")
        for name in archive.namelist():
            if name.startswith("xl/worksheets/") and _cells(archive.read(name)) > _MAX_CELLS:
                raise UserError("sheet-too-large", value=path, cells=_MAX_CELLS)


def _cells(sheet: bytes) -> int:
    """Cells up to the last row and column of an xlsx sheet, which has at least 26 columns."""
    names = set(re.findall(rb'\br="([A-Z]{2,3})\d', sheet))
    columns = (functools.reduce(lambda number, letter: 26 * number + letter - ord("A") + 1, name, 0) for name in names)
    rows = re.findall(rb'<row [^>]*?\br="(\d+)"', sheet[-_LAST_BYTES:])
    return max(columns, default=26) * max(map(int, rows), default=0)


def _text(value: Any) -> str | None:
    """What a cell shows: 5 of 5.0; None of an empty one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) or None
