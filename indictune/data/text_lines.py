"""Read the lines of a UTF-8 file."""

from __future__ import annotations

import codecs
from collections.abc import Iterator


def decoded_lines(path: str) -> Iterator[tuple[str, str]]:
    """Lines with their ends, without a byte order mark, and the first byte that is not UTF-8, such as `0xff`, or "".

    U+DC80 to U+DCFF stand for the bytes that are not UTF-8.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield line.decode(), ""
            except UnicodeDecodeError as error:
                yield line.decode(errors="surrogateescape"), f"0x{line[error.start]:02x}"
