"""Weights files, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from indictune.errors import UserError
from indictune.models.trust import check_indexes

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


class Checkpoint:
    """The tensors of some safetensors files.

    Attributes:
        shapes: of each tensor by name, from the files' headers.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers.

        Raises:
            SafetensorError: a file is no safetensors file.
            OSError: it cannot be opened.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in files:
            file.open("rb").close()  # safetensors (0.8) reports a file without read permission as missing
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    self._files[name] = file
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor, memory-mapped. The file is opened for each: an open file's pages stay in this process's memory."""
        with safe_open(self._files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor


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
