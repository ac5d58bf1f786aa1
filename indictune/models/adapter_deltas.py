"""An adapter's tensors as changes of a base's weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from torch import Tensor

from indictune.errors import Problems, UserError
from indictune.models.weight_files import ADAPTER, Checkpoint, check_adapter

PREFIX = "base_model.model."
PARTS = re.compile(r"(.+)\.(?:lora_(?:embedding_)?(A|B)|lora_magnitude_(vector))(?:\.weight)?")
# With `bias`, peft writes the biases of whole modules three times: also as they were, and under its own name.
REPEATED = r"\.(?:modules_to_save|original_module)\."

# With any of these, more than the base's weights and the matrices makes the model.
UNMERGEABLE = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora"),
)
# These initialisations take the first matrices away from the base's weights, which are then not those of its files.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: matrices that are added to weights, and tensors that take their place.

    Attributes:
        folder: of the adapter.
        config: peft's.
        tensors: the adapter's file.
        whole: name of a tensor of the model to that of the adapter's tensor that takes its place.
        matrices: name of a module to the names of its `A`, its `B` and, for DoRA, its `vector` of lengths.
    """

    folder: Path
    config: LoraConfig
    tensors: Checkpoint
    whole: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def changes(self, name: str) -> bool:
        """Whether a tensor of the model is another one with the adapter."""
        return name in self.whole or _module(name) in self.matrices

    def shape(self, module: str) -> tuple[int, int]:
        """Outputs and inputs of a module that has matrices."""
        parts = self.matrices[module]
        return self.tensors.shapes[parts["B"]][0], self.tensors.shapes[parts["A"]][1]

    def scaling(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        alphas = self.config.alpha_pattern or {}
        alpha = alphas.get(get_pattern_key(list(alphas), module), self.config.lora_alpha)
        rank = self.tensors.shapes[self.matrices[module]["A"]][0]
        return float(alpha) / (math.sqrt(rank) if self.config.use_rslora else rank)

    def added(self, name: str, weight: Tensor) -> Tensor:
        """A weight with the matrices of its module added, in fp32.

        Args:
            name: of the weight; its module has matrices.
            weight: [outputs, inputs].
        """
        parts = self.matrices[_module(name)]
        a, b = (self.tensors.read(parts[part]).float() for part in "AB")
        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling(_module(name)))
        if "vector" in parts:
            lengths = self.tensors.read(parts["vector"]).float().flatten()
            merged *= (lengths / torch.linalg.norm(merged, dim=1))[:, None]
        return merged


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's configuration and the headers of its file.

    Raises:
        UserError: the folder holds no adapter, or one that cannot be merged; with all that is wrong with its tensors.
    """
    config = _read_config(folder)
    try:
        tensors = Checkpoint([folder / ADAPTER])
    except SafetensorError as error:
        raise UserError(f"{folder / ADAPTER}: is no safetensors file, or not all of one ({error}).") from error
    whole: dict[str, str] = {}
    matrices: dict[str, dict[str, str]] = {}
    for name in tensors.shapes:
        inner = name.removeprefix(PREFIX)
        part = PARTS.fullmatch(inner)
        if re.sub(REPEATED, ".", name) in tensors.shapes.keys() - {name}:
            continue
        if part is None:
            whole[inner.replace(".base_layer.", ".")] = name
        else:
            matrices.setdefault(part[1], {})[part[2] or part[3]] = name
    adapter = Adapter(folder, config, tensors, whole, matrices)
    _check_tensors(adapter)
    return adapter


def _read_config(folder: Path) -> LoraConfig:
    path = folder / "adapter_config.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder. Name the folder of an adapter.")
    if not path.is_file():
        if (folder / "config.json").is_file():
            raise UserError(f"{folder}: holds a whole model and no adapter; there is nothing to merge.")
        inside = sorted(each.parent.name for each in folder.glob("*/adapter_config.json"))
        hint = f" There is one in {folder / inside[-1]}." if inside else ""
        raise UserError(f"{folder}: is no adapter's folder (it has no adapter_config.json).{hint}")
    check_adapter(folder, str(folder))
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as peft's configuration of an adapter ({error!r}).") from error
    named = [name for name in UNMERGEABLE if getattr(config, name)]
    if str(config.init_lora_weights).startswith(CHANGES_BASE):
        named.append(f"init_lora_weights {config.init_lora_weights}")
    if named:
        raise UserError(
            f"{path}: {', '.join(named)}: such an adapter is more than matrices added to the base's weights. Merge it "
            "with peft, by merge_and_unload."
        )
    return config


def _check_tensors(adapter: Adapter) -> None:
    shapes = adapter.tensors.shapes
    problems = Problems()
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty:
        problems.append(
            f"{adapter.folder / ADAPTER}: {len(empty)} tensors were saved empty, {empty[0]} for one: the process that "
            "saved them held only its share. Save the adapter again from the training's checkpoint."
        )
    for module, parts in adapter.matrices.items():
        wanted = {"A", "B", "vector"} if adapter.config.use_dora else {"A", "B"}
        if set(parts) != wanted:
            lacking, extra = sorted(wanted - set(parts)), sorted(set(parts) - wanted)
            problems.append(f"{adapter.folder / ADAPTER}: {module} lacks {lacking} of LoRA, and has {extra} too many.")
        elif not empty and not _fit(adapter, module):
            found = ", ".join(f"{part} {list(shapes[name])}" for part, name in sorted(parts.items()))
            problems.append(f"{adapter.folder / ADAPTER}: the matrices of {module} do not fit together: {found}.")
    if not problems and not _is_trained(adapter):
        problems.append(
            f"{adapter.folder}: the adapter was never trained: all of its B matrices are zero or missing, so merging "
            "would write the base again. Name the folder of the trained adapter."
        )
    raise_bounded(problems)


def raise_bounded(problems: Problems, most: int = 10) -> None:
    """Raise the problems in one `UserError`, if there are any: no more than `most` of them, and how many more."""
    if len(problems) > most:
        problems[most:] = [f"... and {len(problems) - most} more of this kind."]
    problems.raise_any()


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _fit(adapter: Adapter, module: str) -> bool:
    """Whether A is [rank, inputs], B [outputs, rank] and the vector has a length for each output."""
    shapes = {part: adapter.tensors.shapes[name] for part, name in adapter.matrices[module].items()}
    a, b = shapes["A"], shapes["B"]
    return len(a) == len(b) == 2 and a[0] == b[1] and math.prod(shapes.get("vector", b[:1])) == b[0]


def _is_trained(adapter: Adapter) -> bool:
    """Every product of matrices is zero before training. An embedding has its zeros in A, all others in B."""
    return any(
        all(bool(adapter.tensors.read(parts[part]).any()) for part in "BA") for parts in adapter.matrices.values()
    )
