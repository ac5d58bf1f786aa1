"""Find the weights files of a model."""

from __future__ import annotations

import json
from pathlib import Path

from indictune.errors import UserError
from indictune.models.trusted_files import check_indexes

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def weights_files(folder: Path, flag: str) -> list[Path]:
    """The safetensors files of a model.

    Raises:
        UserError: `weights-missing`, or as `check_indexes`.
    """
    names = [WHOLE]
    if (folder / INDEX).is_file():
        check_indexes(folder, flag)
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError("weights-missing", flag, folder, files=", ".join(missing[:3]))
    return [folder / name for name in names]
