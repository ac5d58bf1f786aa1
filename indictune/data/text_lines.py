"""The lines of a text file, with those noted whose bytes are no text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator


def decoded_lines(path: str, undecodable: dict[int, str]) -> Iterator[str]:
    """Lines with their ends, without a byte order mark; U+DC80 to U+DCFF stand for bytes that are no UTF-8.

    Args:
        path: of the file.
        undecodable: gets the number of each such line, from 1, and what is wrong with it.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                undecodable[number] = f"byte 0x{line[error.start]:02x} is no UTF-8 text; save the file as UTF-8."
                yield line.decode(errors="surrogateescape")
