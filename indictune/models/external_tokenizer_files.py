"""Files elsewhere that a tokenizer's settings name: their lines would be words of it, and be saved with the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_files

from indictune.errors import UserError
from indictune.models.symlinks import leads_out

# Each with what stands there without being read: files that transformers looks for beside it, and where the tokenizer
# was. Published ones hold their authors' paths. What the second file says goes over that.
_LAST = "special_tokens_map.json"
_SETTINGS = {"tokenizer_config.json": ("tokenizer_file", "special_tokens_map_file", "name_or_path"), _LAST: ()}
# A text there is the name of a file to `tokenizers` (0.23), wherever that is, and transformers (5.23) hands it on.
_OPENED = ("vocab", "merges")
_FILE = "_file"  # how transformers' own names for files end
_BY_ORDER = "init_inputs"  # arguments of the tokenizer's class, of which the first is mostly `vocab`


def check_named_files(name: str, revision: str | None, flag: str) -> None:
    """Refuse a tokenizer whose settings name files outside of its folder.

    Args:
        name: of the model: its folder, or its name on the Hub.
        revision: of that.
        flag: how a message names it.

    Raises:
        UserError: they do.
        OSError: they cannot be read.
        ValueError: they are no JSON.
    """
    files = cached_files(name, list(_SETTINGS), revision=revision, _raise_exceptions_for_missing_entries=False)
    for path in map(Path, files or ()):
        settings = json.loads(path.read_text(encoding="utf-8"))
        read = {key: value for key, value in settings.items() if key not in _SETTINGS[path.name]}
        found = sorted(_named(read, path))
        if found:
            raise UserError(
                f"{flag}: {path.name} has {', '.join(found[:3])}, which names a file for its tokenizer that would be "
                "saved with the trained model. If it belongs to the model, put a copy of it beside the settings, "
                "under its usual name, and take the entry out."
            )


def _named(settings: dict[str, Any], path: Path) -> Iterator[str]:
    """The entries that name a file elsewhere, or may: the class of the tokenizer decides what each means."""
    folder = path.parent
    for key, value in settings.items():
        if (key == _BY_ORDER and value) or (key in _OPENED and isinstance(value, str)):
            yield f"{key} {value!r}"
        else:
            for text in _texts(value):
                # The folder's own file of the name goes over what the first settings say.
                is_file = key.endswith(_FILE) and (path.name == _LAST or not (folder / text).exists())
                if _is_elsewhere(text, folder, is_file):
                    yield f"{key} {text!r}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _is_elsewhere(text: str, folder: Path, is_file: bool) -> bool:
    """Whether a text is the path of a file, from here or from the folder, that is not in the folder. A name alone is
    none where its entry is of no file: tokens are short, and what the current folder holds has nothing to do with
    them."""
    paths = [path for path in (text, os.path.join(folder, text)) if os.path.exists(path) and not os.path.isdir(path)]
    return (is_file or os.sep in text) and any(leads_out(Path(path), folder) for path in paths)
