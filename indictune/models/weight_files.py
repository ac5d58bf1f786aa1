"""Weights files, read and written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from indictune.errors import UserError
from indictune.models.trust import check_indexes

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

# bitsandbytes stores these with each 4-bit weight, under names that start with the name of the weight.
PARTS_4BIT = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"),
)


class Checkpoint:
    """The tensors of some safetensors files. 4-bit weights are dequantised as they are read.

    Attributes:
        shapes: of each tensor by name, from the files' headers.
        dtypes: of each tensor by name, except 4-bit weights.
        in_4bit: names of the weights that are stored in 4 bit.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers.

        Raises:
            SafetensorError: a file is no safetensors file.
            OSError: it cannot be opened.
        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        for file in files:
            file.open("rb").close()  # safetensors (0.8) reports a file without read permission as missing
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    self._files[name] = file
                    stored = opened.get_slice(name)
                    self.shapes[name] = tuple(stored.get_shape())
                    self.dtypes[name] = stored[:0].dtype if self.shapes[name] else opened.get_tensor(name).dtype
        self.in_4bit = {name.removesuffix(".absmax") for name in self.shapes if name.endswith(".absmax")}
        for name in self.in_4bit:
            self.shapes[name] = self._shape_of_4bit(name)
            del self.dtypes[name]
            for part in self._parts(name):
                del self.shapes[part], self.dtypes[part]

    def read(self, name: str) -> Tensor:
        """A tensor, memory-mapped unless it is dequantised.

        The file is opened for each tensor: pages of an open file stay in the memory of this process.
        """
        if name not in self.in_4bit:
            return self._stored(name)
        from bitsandbytes.functional import QuantState, dequantize_4bit  # slow to import

        parts = {part.removeprefix(f"{name}."): self._stored(part) for part in self._parts(name)}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        weight: Tensor = dequantize_4bit(self._stored(name), state)
        return weight

    def dtype(self) -> torch.dtype:
        """The floating-point type of most of the tensors that are not in 4 bit."""
        floating = [dtype for dtype in self.dtypes.values() if dtype.is_floating_point] or [torch.bfloat16]
        return max(floating, key=floating.count)

    def _stored(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def _parts(self, name: str) -> list[str]:
        return [f"{name}.{part}" for part in PARTS_4BIT if f"{name}.{part}" in self._files]

    def _shape_of_4bit(self, name: str) -> tuple[int, ...]:
        from bitsandbytes.utils import unpack_tensor_to_dict

        (state,) = (part for part in self._parts(name) if ".quant_state." in part)
        return tuple(unpack_tensor_to_dict(self._stored(state))["shape"])  # type: ignore[no-untyped-call]


def weights_files(folder: Path, flag: str) -> list[Path]:
    """The safetensors files of a model.

    Args:
        folder: of the model.
        flag: that names the model, for messages.

    Raises:
        UserError: `weights-pickled`, `weights-missing`, or the index names files that are missing or outside.
    """
    names = [WHOLE]
    if (folder / INDEX).is_file():
        check_indexes(folder, flag)
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing == [WHOLE] and any(folder.glob("pytorch_model*.bin")):
        raise UserError("weights-pickled", flag, folder)
    if missing:
        raise UserError("weights-missing", flag, folder, files=", ".join(missing[:3]))
    return [folder / name for name in names]


def write_shards(
    folder: Path, expected: Mapping[str, Tensor], value_of: Callable[[str], Tensor], max_shard_size: str
) -> list[Path]:
    """Write tensors to safetensors files, with at most one file's tensors in memory.

    Args:
        folder: gets the files, and an index where there are several.
        expected: name to a tensor on the device `meta`, of the shape and type to write.
        value_of: makes the tensor of a name.
        max_shard_size: of one file, such as "5GB". A larger tensor gets its own file.

    Returns:
        The files.
    """
    split = split_state_dict_into_shards_factory(
        dict(expected),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in split.filename_to_tensors.items():
        save_file({name: value_of(name) for name in names}, folder / filename, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [folder / filename for filename in split.filename_to_tensors]
