"""Read json files that hold columns, as pandas writes them: `{"text": {"0": ...}}` or `{"text": [...]}`."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any

from indictune.data.bad_rows import BadRows
from indictune.data.json_rows import DECODER, ERRORS, beginning_of, has_half_emoji, is_list
from indictune.data.packed_files import opened

_COLUMN = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*[\[{]')  # an object that begins with a list or an object


def json_by_columns(path: str, bad: BadRows) -> Iterator[tuple[int, object]] | None:
    """The number and the values of each row, from 1; None if the file does not hold columns of one length.

    Memory holds the whole file.
    """
    beginning = beginning_of(path)
    if _COLUMN.match(beginning) is None or is_list(beginning):
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
    return _rows(columns, r"\ud" in text.lower(), bad)


def _rows(columns: dict[str, Any], may_be_cut: bool, bad: BadRows) -> Iterator[tuple[int, object]]:
    first = next(iter(columns.values()))
    for number, key in enumerate(first if isinstance(first, dict) else range(len(first)), 1):
        row = {name: column.get(key) if isinstance(column, dict) else column[key] for name, column in columns.items()}
        if may_be_cut and has_half_emoji(r"\ud", row):
            bad.add(number, "half-emoji", row)
        else:
            yield number, row
