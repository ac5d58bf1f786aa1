"""Weights files, read and written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from indictune.errors import UserError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"

# bitsandbytes stores these beside a weight in 4 bit, each after the weight's name.
PARTS_4BIT = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"),
)


class Checkpoint:
    """The tensors of some safetensors files. Weights in 4 bit are read as what they stand for.

    Attributes:
        shapes: of each tensor by name, from the files' headers.
        dtypes: of each tensor by name, but for weights in 4 bit.
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
            file.open("rb").close()  # of a file that is closed to this user safetensors (0.8) says that there is none
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no mapping)
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
        """A tensor; its pages are the file's own where nothing has to be computed.

        The file is opened anew for each: what an open one has read stays in this process's memory.
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
        flag: how a message names it.

    Raises:
        UserError: there are none, or one that the index names is missing or stands elsewhere.
    """
    names = [WHOLE]
    if (folder / INDEX).is_file():
        check_indexes(folder, flag)
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing == [WHOLE]:
        pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        found = f" but {pickled[0]}, a pickle, which can run code when it is read" if pickled else ""
        raise UserError(
            f"{flag}: has no {WHOLE}{found}. Convert it once (load it with transformers, then save_pretrained), "
            "and give the new folder by --base_model."
        )
    if missing:
        raise UserError(f"{flag}: {INDEX} names {', '.join(missing[:3])}, which is not there; fetch the model again.")
    return [folder / name for name in names]


def check_adapter(folder: Path, flag: str) -> None:
    """Refuse an adapter with which peft (0.21) would read or import more than safetensors and JSON of its folder.

    Kinds other than LoRA name files of other folders: MULTITASK_PROMPT_TUNING a pickle to begin with, XLORA further
    adapters. LoRA's `megatron_config` has a module imported. A pickle of weights is read where there are no others.

    Args:
        folder: of the adapter, with its `adapter_config.json`.
        flag: how a message names it.

    Raises:
        UserError: it is of another kind, or has no safetensors file.
    """
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, imports = config["peft_type"], config.get("megatron_config")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as peft's configuration of an adapter ({error!r}).") from error
    if kind != "LORA" or imports:
        found = (
            f"peft_type {kind!r}, only LORA is read here" if kind != "LORA" else "megatron_config, which imports code"
        )
        raise UserError(f"{path}: has {found}. Merge the adapter with peft where it was made, and use that model.")
    if not (folder / ADAPTER).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        found = ", only adapter_model.bin, a pickle, which can run code when it is read" if pickled else ""
        raise UserError(
            f"{flag}: has no {ADAPTER}{found}. Load the adapter with peft where it was made, and save it again."
        )


def check_indexes(folder: Path, flag: str) -> None:
    """Refuse an index of weights that names a file outside its folder: transformers 5.23 would read it.

    Args:
        folder: of a model.
        flag: how a message names it.

    Raises:
        UserError: with all such names, or an index cannot be read.
    """
    problems = []
    for index in sorted(folder.glob("*.index.json")):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            outside = sorted(name for name in names if not is_inside(name))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{flag}: {index.name} cannot be read as an index of weights ({error!r}).")
            continue
        if outside:
            problems.append(
                f"{flag}: {index.name} names {', '.join(map(repr, outside[:3]))}, outside the model's folder. Do not "
                "use this model, or fetch it again from where you trust it."
            )
    if problems:
        raise UserError(problems)


def is_inside(name: str) -> bool:
    """Whether a name that was read from a file stays below the folder that the file is in."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def write_shards(
    folder: Path, expected: Mapping[str, Tensor], value_of: Callable[[str], Tensor], max_shard_size: str
) -> list[Path]:
    """Write tensors to safetensors files, holding no more than one file's in memory.

    Args:
        folder: gets the files, and an index where there are several.
        expected: name to a tensor without data (on the device `meta`) of the shape and type that will be written.
        value_of: makes the tensor of a name.
        max_shard_size: of one file, such as "5GB"; a tensor that is larger has a file of its own.

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
