"""Find the files that names, patterns and folders stand for."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from indictune.errors import UserError

# `save_to_disk` of `datasets` writes them to the folder of a split, and to that of several splits.
_OF_SPLIT, _OF_SPLITS = "state.json", "dataset_dict.json"


def files_named(named: str | Sequence[str], split: str) -> tuple[str, tuple[str, ...]]:
    """A short name for the files, as messages have it, and each file once.

    Args:
        named: names of files, patterns such as `data/*.csv`, and folders that `save_to_disk` wrote.
        split: taken of a folder with several splits.

    Raises:
        UserError: a pattern matches no file, or a folder is no saved dataset. A missing file is reported when it is
            read.
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
        if (Path(name) / _OF_SPLIT).is_file():
            return in_folder["train"]
        if split not in in_folder:
            raise UserError("saved-split-missing", value=name, split=split, splits=", ".join(in_folder))
        return in_folder[split]
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
    except (OSError, ValueError) as error:
        raise UserError("rows-unreadable", value=path, reason=error) from error
