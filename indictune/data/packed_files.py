"""Open data files, unpacked if their names end in .gz or .zst."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from indictune.errors import UserError

PACKED = (".gz", ".zst")
_BUFFER_BYTES = 1 << 20
# A file may unpack to this, or to so many times its size: texts do not compress further, bombs do.
MAX_UNPACKED_BYTES = 1 << 30
MAX_RATIO = 100


def kind_of_file(path: str | Path) -> str:
    """The extension that says how a file is read, in lower case: `.csv` of `a.csv.gz`."""
    file = Path(path)
    return Path(file.stem).suffix.lower() if file.suffix.lower() in PACKED else file.suffix.lower()


def opened(path: str) -> BinaryIO:
    """A file, opened to read its bytes after unpacking.

    Reading from it raises `UserError` if it is damaged, or larger than the limit.
    """
    packing = Path(path).suffix.lower()
    if packing not in PACKED:
        return open(path, "rb")
    unpacked = gzip.GzipFile(path) if packing == ".gz" else pa.CompressedInputStream(pa.OSFile(path), "zstd")
    return cast(BinaryIO, io.BufferedReader(_Limited(unpacked, path), _BUFFER_BYTES))


def unpacked_limit(path: str) -> int:
    """Bytes that a packed file may unpack to."""
    return max(MAX_UNPACKED_BYTES, MAX_RATIO * os.path.getsize(path))


class _Limited(io.RawIOBase):
    """A stream that unpacks a file, up to the limit."""

    def __init__(self, unpacked: Any, path: str) -> None:
        self._unpacked, self._path = unpacked, path
        self._left = self._limit = unpacked_limit(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._unpacked.readinto(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise UserError("unpacking-failed", value=self._path, reason=error) from error
        self._left -= count
        if self._left < 0:
            raise UserError("unpacked-too-large", value=self._path, limit=self._limit)
        return count

    def close(self) -> None:
        self._unpacked.close()
        super().close()
