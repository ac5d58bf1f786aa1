"""Read the lines of a UTF-8 file."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from indictune.data.packed_files import opened


def decoded_lines(path: str) -> Iterator[tuple[str, str]]:
    """Lines with their ends, without a byte order mark, and the first byte that is not UTF-8, such as `0xff`, or "".

    U+DC80 to U+DCFF stand for the bytes that are not UTF-8.
    """
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            yield decoded(line, number)


def decoded(line: bytes, number: int) -> tuple[str, str]:
    """The text of a line and its first byte that is not UTF-8, as in `decoded_lines`; `number` counts from 1."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode(), ""
    except UnicodeDecodeError as error:
        return line.decode(errors="surrogateescape"), f"0x{line[error.start]:02x}"
