"""Digests of the files of a run's rows, which each rank compares with those of the others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indictune.data.read.open_files import files_named
from indictune.data.read.row_sources import SPLITS, entries_of
from indictune.distributed.doctor.lines import Line
from indictune.errors import UserError

CHECK = "rows"

_READ_WHOLE, _PARTS, _PART = 256 << 20, 64, 1 << 20  # bytes, parts, bytes
_DIGITS = 12
_UNREADABLE = "unreadable"


def row_digests(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Flag of rows -> the files, bytes and digest behind it.

    A file above 256 MiB has the digest of its size and of 64 parts of it: the whole would take long. Names do not
    count, as nodes may have the files in different folders.
    """
    found = {}
    for split in SPLITS:
        if named := configuration.get(f"{split}_file"):
            found[f"content of --{split}_file"] = _shown(named, split)
    if entries := configuration.get("train_files"):
        found["content of --train_files"] = _shown(entries, "train", has_weights=True)
    return found


def row_line(digests: Mapping[str, str]) -> Line:
    """Whether the files of `row_digests` can be read."""
    missing = [
        f"{name.removeprefix('content of ')} is {each}" for name, each in digests.items() if _UNREADABLE in each
    ]
    if missing:
        return Line(CHECK, "fail", "; ".join(missing), "Check the paths and permissions on this node.")
    found = [f"{name.removeprefix('content of ')}: {each}" for name, each in digests.items()]
    return Line(CHECK, "ok", "; ".join(found) or "no files are named")


def _shown(named: Any, split: str, has_weights: bool = False) -> str:
    try:
        files = (
            [file for each in entries_of(named) for file in each.files]
            if has_weights
            else files_named(named, split)[1]
        )
        digest, size = hashlib.sha256(), 0
        for file in files:
            size += _add(digest, Path(file))
    except OSError as error:
        return f"{_UNREADABLE}: {error.filename}: {error.strerror}"
    except UserError as error:
        return f"{_UNREADABLE}: {error}"
    return f"{len(files)} file(s), {size:,} bytes, digest {digest.hexdigest()[:_DIGITS]}"


def _add(digest: Any, path: Path) -> int:
    """Add a file to a digest; returns its size."""
    size = path.stat().st_size
    step = _PART if size <= _READ_WHOLE else size // _PARTS
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_PART))
    return size
