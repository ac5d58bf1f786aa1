"""Find data files by name, pattern or folder, open them, unpacked if need be, and decode their lines."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
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


def decoded_lines(path: str) -> Iterator[tuple[str, str]]:
    """Lines with their ends, without a byte order mark, and the first byte that is not UTF-8, such as `0xff`, or "".

    U+DC80 to U+DCFF stand for the bytes that are not UTF-8.
    """
    with opened(path) as file:
        first = chain.from_iterable(map(lines_of_old_macs, islice(file, 1)))
        for number, line in enumerate(chain(first, file), 1):
            yield decoded(line, number)


def lines_of_old_macs(line: bytes) -> list[bytes]:
    """The lines of a file whose lines end in carriage returns, which is one line up to a line feed."""
    if b"\r" not in line or line.endswith(b"\n"):
        return [line]
    return [each + b"\n" for each in line.removesuffix(b"\r").split(b"\r")]


def decoded(line: bytes, number: int) -> tuple[str, str]:
    """The text of a line and its first byte that is not UTF-8, as in `decoded_lines`; `number` counts from 1."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode(), ""
    except UnicodeDecodeError as error:
        return line.decode(errors="surrogateescape"), f"0x{line[error.start]:02x}"


# `save_to_disk` of `datasets` writes them to the folder of a split, and to that of several splits.
_OF_SPLIT, _OF_SPLITS = "state.json", "dataset_dict.json"


def files_named(named: str | Sequence[str], split: str) -> tuple[str, tuple[str, ...]]:
    """A short name for the files, as messages have it, and each file once.

    `named` are files, patterns such as `data/*.csv`, and folders that `save_to_disk` wrote, of which `split` is taken.
    Raises `UserError` if no file has a pattern, or a folder is no saved dataset. Reading reports a missing file.
    """
    names = [named] if isinstance(named, str) else list(named)
    files = tuple(dict.fromkeys(file for name in names for file in _files(name, split)))
    if len(names) == 1:
        return (files[0] if len(files) == 1 and not Path(names[0]).is_dir() else names[0]), files
    return f"{names[0]} and {len(names) - 1} more", files


def saved_splits(folder: str) -> dict[str, tuple[str, ...]] | None:
    """Split -> files of a folder that `save_to_disk` wrote, `train` if it is one split; None for another folder."""
    if (Path(folder) / _OF_SPLIT).is_file():
        return {"train": _saved_files(Path(folder))}
    if (Path(folder) / _OF_SPLITS).is_file():
        names: list[str] = _json(Path(folder) / _OF_SPLITS)["splits"]
        return {name: _saved_files(Path(folder) / name) for name in names}
    return None


def _files(name: str, split: str) -> Sequence[str]:
    if Path(name).is_dir():
        in_folder = saved_splits(name)
        if in_folder is None:
            raise UserError("folder-not-saved", value=name)
        wanted = "train" if (Path(name) / _OF_SPLIT).is_file() else split
        if wanted not in in_folder:
            raise UserError("saved-split-missing", value=name, split=split, splits=", ".join(in_folder))
        return in_folder[wanted]
    if Path(name).exists() or not glob.has_magic(name):
        return [name]
    if found := sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file()):
        return found
    raise UserError("no-files-match", value=name)


def _saved_files(folder: Path) -> tuple[str, ...]:
    return tuple(str(folder / each["filename"]) for each in _json(folder / _OF_SPLIT)["_data_files"])


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("rows-unreadable", value=path, reason=error) from error
