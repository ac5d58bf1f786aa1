"""Read the lines of a UTF-8 file, and note the lines that are not UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Iterator


def decoded_lines(path: str, undecodable: dict[int, str]) -> Iterator[str]:
    """Lines with their ends, without a byte order mark; U+DC80 to U+DCFF stand for bytes that are not UTF-8.

    Args:
        path: of the file.
        undecodable: gets the number of each such line, from 1, and its first wrong byte, such as `0xff`.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                undecodable[number] = f"0x{line[error.start]:02x}"
                yield line.decode(errors="surrogateescape")
