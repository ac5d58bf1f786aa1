"""Read the rows of xlsx and ods files, in a process of their own, which a hostile file may end."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from indictune.data.bad_rows import BadRows
from indictune.data.columns import Wanted, shortened
from indictune.data.read.delimited import SAMPLE_ROWS, Cells, cell_picker, without_given_names
from indictune.data.read.open_files import opened, unpacked_limit
from indictune.errors import UserError
from indictune.files import PACKED, kind_of_file

SHEET_EXTENSIONS = (".xlsx", ".ods")
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # Excel keeps a workbook with a password in such a file, and no zip
_MEMORY_BYTES = 8 << 30  # of the process that reads a sheet


def sheet_rows(path: str, wanted: Wanted, bad: BadRows) -> Iterator[tuple[int, Cells]]:
    """The number of each row that is not empty, as the spreadsheet shows it, and its cells as of `delimited_rows`.

    Raises `UserError` for a password, damage, too large a sheet, or as `cell_picker`.
    """
    with opened(path) as file:
        content = io.BytesIO(file.read())
    if content.getbuffer()[: len(_OLE)] == _OLE:
        raise UserError("sheet-protected", value=path)
    limit = unpacked_limit(path)
    try:
        with zipfile.ZipFile(content) as archive:
            if sum(each.file_size for each in archive.infolist()) > limit:
                raise UserError("unpacked-too-large", value=path, limit=limit)
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"its part {damaged} is damaged")
    except (zipfile.BadZipFile, zlib.error, OSError, RuntimeError) as error:
        raise UserError("sheet-damaged", value=path, reason=error) from error
    rows = _rows_of_process(path, content, wanted.sheet, bad)
    first = list(islice(rows, SAMPLE_ROWS))
    if not first:
        return
    sample = [[field or "" for field in row] for _, row in first]
    wanted = replace(without_given_names(path, sample, wanted, bad), delimiter="auto")
    has_header = not wanted.column_names
    header = [name.strip() for name in sample[0]] if has_header else list(wanted.column_names)
    pick = cell_picker(path, header, sample, wanted, bad)
    for number, row in chain(first[has_header:], rows):
        yield number, pick(row)


def _rows_of_process(
    path: str, content: io.BytesIO, sheet: str | None, bad: BadRows
) -> Iterator[tuple[int, list[str | None]]]:
    """The number and cells of each row of a sheet that is not empty, from a process that reads the file.

    python-calamine (0.9) takes memory for all cells up to the last row and column of a sheet, and aborts the process
    where there is none. By its path, it knows an ods file with a password.
    """
    with tempfile.NamedTemporaryFile(suffix=kind_of_file(path)) as unpacked:
        if is_packed := path.lower().endswith(PACKED):
            unpacked.write(content.getbuffer())
            unpacked.flush()
        name = unpacked.name if is_packed else os.path.abspath(path)
        command = [sys.executable, "-P", "-m", __name__, name, str(_MEMORY_BYTES), *([sheet] if sheet else [])]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    held = json.loads(line) if line.endswith(b"\n") else {}  # of a process that died
                    if isinstance(held, list):
                        yield held[0], held[1]
                    elif "code" in held:
                        raise UserError(held["code"], value=path, reason=held["reason"])
                    elif sheet is not None and sheet not in (names := held.get("names", [sheet])):
                        known = ", ".join(map(shortened, names))
                        raise UserError("no-such-sheet", value=path, sheet=sheet, names=known)
                    elif sheet is None and (others := held.get("names", [])[1:]):
                        unread = ", ".join(map(shortened, others))
                        bad.remark(f"{path}: its sheet {held['names'][0]} is read, and not {unread} (--sheet).")
                if process.wait() != 0:
                    raise UserError("sheet-too-large", value=path, limit=_MEMORY_BYTES, end=process.returncode)
            finally:
                process.kill()


def _text(value: Any) -> str | None:
    """What a cell shows: 5 of 5.0; None of an empty one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) or None


def _write_rows(path: str, sheet: str | None) -> None:
    """Write the names of the sheets, and the number and cells of each row that is not empty, as lines of JSON."""
    import python_calamine

    try:
        book = python_calamine.load_workbook(path)
        print(json.dumps({"names": book.sheet_names}))
        read = sheet if sheet in book.sheet_names else book.sheet_names[0]
        for number, row in enumerate(book.get_sheet_by_name(read).iter_rows(), 1):
            cells = [_text(value) for value in row]
            if any(cells):
                print(json.dumps([number, cells]))
    except python_calamine.PasswordError:
        print(json.dumps({"code": "sheet-protected", "reason": ""}))
    except (python_calamine.CalamineError, zipfile.BadZipFile, zlib.error, OSError, RuntimeError) as error:
        print(json.dumps({"code": "sheet-damaged", "reason": str(error)}))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    given, most = int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = given if most == resource.RLIM_INFINITY else min(given, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write_rows(sys.argv[1], next(iter(sys.argv[3:]), None))
