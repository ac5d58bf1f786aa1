"""Read a LoRA adapter as changes of its base's weights."""

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

from indictune.errors import Problem, UserError, problem
from indictune.models.trust import ADAPTER, ADAPTER_CONFIG, check_adapter
from indictune.models.weight_files import Checkpoint

PREFIX = "base_model.model."
PARTS = re.compile(r"(.+)\.(?:lora_(?:embedding_)?(A|B)|lora_magnitude_(vector))(?:\.weight)?")
MOST_PROBLEMS = 10  # in one message

# Fields of an adapter that is more than the base's weights plus matrices.
UNMERGEABLE = (
    *("alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "kasa_config", "layer_replication"),
    *("lora_bias", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora"),
)
# These initialisations subtract the first matrices from the base's weights, which then differ from its files.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: matrices that are added to weights, and tensors that replace weights.

    Attributes:
        folder: of the adapter.
        config: peft's.
        tensors: of the adapter's file.
        whole: name of a weight of the model -> name of the adapter's tensor that replaces it.
        matrices: name of a module -> names of its `A`, its `B` and, for DoRA, its `vector` of lengths.
    """

    folder: Path
    config: LoraConfig
    tensors: Checkpoint
    whole: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def changes(self, name: str) -> bool:
        """Whether the adapter changes a weight of the model."""
        return name in self.whole or _module(name) in self.matrices

    def shape(self, module: str) -> tuple[int, int]:
        """[outputs, inputs] of a module with matrices."""
        parts = self.matrices[module]
        return self.tensors.shapes[parts["B"]][0], self.tensors.shapes[parts["A"]][1]

    def scaling(self, module: str) -> float:
        """The factor of the product of a module's matrices."""
        alphas = self.config.alpha_pattern or {}
        alpha = alphas.get(get_pattern_key(list(alphas), module), self.config.lora_alpha)
        rank = self.tensors.shapes[self.matrices[module]["A"]][0]
        return float(alpha) / (math.sqrt(rank) if self.config.use_rslora else rank)

    def added(self, name: str, weight: Tensor) -> Tensor:
        """A weight plus the product of its module's matrices, in fp32.

        Args:
            name: of the weight, whose module has matrices.
            weight: [outputs, inputs].
        """
        parts = self.matrices[_module(name)]
        a, b = (self.tensors.read(parts[part]).float() for part in "AB")
        merged = torch.addmm(weight.float(), b, a, alpha=self.scaling(_module(name)))
        if "vector" in parts:
            lengths = self.tensors.read(parts["vector"]).float().flatten()
            merged *= (lengths / torch.linalg.norm(merged, dim=1))[:, None]
        return merged


def read_adapter(folder: Path, flag: str) -> Adapter:
    """Read an adapter's configuration and the headers of its file.

    Args:
        folder: of the adapter.
        flag: that names the folder, for messages.

    Raises:
        UserError: the folder holds no adapter, the adapter is not trusted or cannot be merged, or with every problem
            of its tensors.
    """
    config = _read_config(folder, flag)
    try:
        tensors = Checkpoint([folder / ADAPTER])
    except SafetensorError as error:
        raise UserError("unreadable", flag, folder / ADAPTER, reason=error) from error
    whole: dict[str, str] = {}
    matrices: dict[str, dict[str, str]] = {}
    for name in tensors.shapes:
        inner = name.removeprefix(PREFIX)
        part = PARTS.fullmatch(inner)
        if part is None:
            whole[inner.replace(".base_layer.", ".")] = name
        else:
            matrices.setdefault(part[1], {})[part[2] or part[3]] = name
    adapter = Adapter(folder, config, tensors, whole, matrices)
    problems = _tensor_problems(adapter, flag)
    if problems:
        raise UserError(problems=problems[:MOST_PROBLEMS])
    return adapter


def _read_config(folder: Path, flag: str) -> LoraConfig:
    if not folder.is_dir():
        raise UserError("no-such-folder", flag, folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        if (folder / "config.json").is_file():
            raise UserError("model-instead-of-adapter", flag, folder)
        inside = sorted(each.parent.name for each in folder.glob(f"*/{ADAPTER_CONFIG}"))
        hint = f" There is one in {folder / inside[-1]}." if inside else ""
        raise UserError("folder-without-adapter", flag, folder, hint=hint)
    check_adapter(folder, flag)
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("adapter-config-unreadable", flag, folder, reason=repr(error)) from error
    found = [name for name in UNMERGEABLE if getattr(config, name)]
    found += [f"bias {config.bias}"] * (config.bias != "none")
    if str(config.init_lora_weights).startswith(CHANGES_BASE):
        found.append(f"init_lora_weights {config.init_lora_weights}")
    if found:
        raise UserError("adapter-cannot-be-merged", flag, folder, found=", ".join(found))
    return config


def _tensor_problems(adapter: Adapter, flag: str) -> list[Problem]:
    given, shapes = (flag, adapter.folder), adapter.tensors.shapes
    problems = []
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if empty:
        problems.append(problem("adapter-tensors-empty", *given, count=len(empty), tensor=empty[0]))
    for module, parts in adapter.matrices.items():
        wanted = {"A", "B", "vector"} if adapter.config.use_dora else {"A", "B"}
        if set(parts) != wanted:
            found = ", ".join(sorted(parts))
            details = {"module": module, "found": found, "wanted": ", ".join(sorted(wanted))}
            problems.append(problem("adapter-matrices-incomplete", *given, None, **details))
        elif not empty and not _fit(adapter, module):
            found = ", ".join(f"{part} {list(shapes[name])}" for part, name in sorted(parts.items()))
            problems.append(problem("adapter-matrices-disagree", *given, module=module, found=found))
    if not problems and not _is_trained(adapter):
        problems.append(problem("adapter-not-trained", *given))
    return problems


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _fit(adapter: Adapter, module: str) -> bool:
    """Whether A is [rank, inputs], B is [outputs, rank] and the vector has a length for each output."""
    shapes = {part: adapter.tensors.shapes[name] for part, name in adapter.matrices[module].items()}
    a, b = shapes["A"], shapes["B"]
    return len(a) == len(b) == 2 and a[0] == b[1] and math.prod(shapes.get("vector", b[:1])) == b[0]


def _is_trained(adapter: Adapter) -> bool:
    """Whether any product of matrices is not zero. Before training all are: A of an embedding is zero, B of others."""
    return any(
        all(bool(adapter.tensors.read(parts[part]).any()) for part in "BA") for parts in adapter.matrices.values()
    )
