"""Plan where each tensor of a merged model comes from: the adapter, or the base as it was in training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import TaskType
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from indictune.config.command_arguments import MergeArguments
from indictune.errors import UserError, problem
from indictune.models.adapter_base import config_file
from indictune.models.adapter_deltas import MOST_PROBLEMS, Adapter
from indictune.models.weight_files import Checkpoint

CLASSES: dict[str, Any] = {
    TaskType.CAUSAL_LM: AutoModelForCausalLM,
    TaskType.SEQ_CLS: AutoModelForSequenceClassification,
}
READABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rounding:
    """How the base was rounded when it was loaded for the training.

    Attributes:
        settings: of bitsandbytes.
        dtype: of all weights before quantisation.
        names: of the quantised weights.
    """

    settings: BitsAndBytesConfig
    dtype: torch.dtype
    names: frozenset[str]


@dataclass(frozen=True)
class Merger:
    """Makes each tensor of the merged model.

    Attributes:
        adapter: the changes.
        base: the base's tensors.
        model: the merged model, on the device `meta`.
        sources: name of a tensor of the model -> its name in the base's checkpoint.
        expected: the tensors to write, on the device `meta`.
        dtype: of the merged weights.
        rounding: of the base's weights; None for no rounding.
    """

    adapter: Adapter
    base: Checkpoint
    model: PreTrainedModel
    sources: dict[str, str]
    expected: dict[str, Tensor]
    dtype: torch.dtype
    rounding: Rounding | None

    def value(self, name: str) -> Tensor:
        """The merged tensor of a name.

        Raises:
            UserError: `merged-weights-not-finite`.
        """
        if name in self.adapter.whole:
            weight = self.adapter.tensors.read(self.adapter.whole[name])
        else:
            weight = self._base(name)
        if name.removesuffix(".weight") in self.adapter.matrices:
            weight = _oriented(self.model, name, self.adapter.added(name, _oriented(self.model, name, weight)))
        if weight.is_floating_point():
            weight = weight.to(self.dtype)
            if not bool(weight.isfinite().all()):
                raise UserError("merged-weights-not-finite", "--dtype", self.dtype, weight=name)
        return weight.contiguous()

    def size_bytes(self) -> int:
        """Of the merged weights."""
        return sum(tensor.nbytes for tensor in self.expected.values())

    def _base(self, name: str) -> Tensor:
        """The base's weight as it was in training."""
        weight = self.base.read(self.sources[name])
        if self.rounding is None or not weight.is_floating_point():
            return weight
        weight = weight.to(self.rounding.dtype)
        if name not in self.rounding.names:
            return weight
        return _oriented(self.model, name, _dequantised(_oriented(self.model, name, weight), self.rounding.settings))


def skeleton(
    adapter: Adapter, base_folder: Path, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """The merged model on the device `meta`, and the quantisation of its base in training.

    The dtype of its configuration is the one of the base when it was loaded.

    Raises:
        UserError: `adapter-task`.
    """
    task = adapter.config.task_type
    if task not in CLASSES:
        raise UserError("adapter-task", "--adapter", adapter.folder, task=task, known=" or ".join(CLASSES))
    described = config_file(adapter.folder).is_file()
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        config_file(adapter.folder) if described else base_folder, trust_remote_code=trust_remote_code
    )
    settings = config.to_dict().get("quantization_config")
    if settings is not None:
        del config.quantization_config
        config.dtype = config.dtype or torch.bfloat16
    with torch.device("meta"):
        model: PreTrainedModel = CLASSES[task].from_config(config, trust_remote_code=trust_remote_code)
    model.config.architectures = [type(model).__name__]
    return model, settings


def plan(
    args: MergeArguments,
    adapter: Adapter,
    base: Checkpoint,
    model: PreTrainedModel,
    settings: dict[str, Any] | None,
) -> Merger:
    """Find where each tensor of the merged model comes from.

    Args:
        args: of the command.
        adapter: the changes.
        base: the base's tensors.
        model: from `skeleton`.
        settings: from `skeleton`.

    Raises:
        UserError: the adapter does not fit the base, or the flags do not fit the adapter.
    """
    sources = _sources(model, base)
    rounding = _rounding(args, adapter, base, model, settings, sources)
    state = model.state_dict()
    for target, origin in model.all_tied_weights_keys.items():
        sources.setdefault(target, sources.get(origin, target))
        sources.setdefault(origin, sources[target])
        if not (adapter.changes(target) or adapter.changes(origin)):
            del state[target]
        else:  # training, too, changed one of the tied weights without the other
            model.config.tie_word_embeddings = False
    _check_fit(adapter, base, model, sources, state)
    dtype = getattr(torch, args.dtype) if args.dtype else base.dtype()
    expected = {
        name: torch.empty_like(tensor, dtype=dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in state.items()
    }
    return Merger(adapter, base, model, sources, expected, dtype, rounding)


def _rounding(
    args: MergeArguments,
    adapter: Adapter,
    base: Checkpoint,
    model: PreTrainedModel,
    settings: dict[str, Any] | None,
    sources: dict[str, str],
) -> Rounding | None:
    """How the base's weights are rounded before the adapter is added; None for no rounding."""
    if args.base_weights == "dequantised" and settings is None:
        raise UserError("base-was-not-quantised", "--base_weights", args.base_weights, adapter=adapter.folder)
    if settings is None or args.base_weights == "original":
        return None
    if not settings.get("load_in_4bit"):
        raise UserError("base-quantised-otherwise", "--adapter", adapter.folder, method=settings.get("quant_method"))
    config: BitsAndBytesConfig = BitsAndBytesConfig.from_dict(settings)  # type: ignore[no-untyped-call]
    # A base that is stored in 4 bit was not quantised again. `sources` leaves out weights tied to others.
    names = frozenset() if base.in_4bit else _quantised(model, config) & sources.keys()
    return Rounding(config, cast(torch.dtype, model.config.dtype), frozenset(names))


def _sources(model: PreTrainedModel, base: Checkpoint) -> dict[str, str]:
    """Name in the model -> name in the checkpoint, by transformers' rules for old and headless checkpoints."""
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    found = {}
    for name in base.shapes:
        renamed, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        found[renamed if renamed in state else name] = name
    return {name: source for name, source in found.items() if name in state}


def _quantised(model: PreTrainedModel, settings: BitsAndBytesConfig) -> frozenset[str]:
    """Names of the weights that transformers quantises on loading."""
    from bitsandbytes.nn.modules import Linear4bit  # slow to import
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    with torch.device("meta"):
        loaded = type(model)(model.config)
    Bnb4BitHfQuantizer(settings, pre_quantized=False).preprocess_model(model=loaded, device_map=None)
    return frozenset(f"{name}.weight" for name, module in loaded.named_modules() if isinstance(module, Linear4bit))


def _check_fit(
    adapter: Adapter, base: Checkpoint, model: PreTrainedModel, sources: dict[str, str], state: dict[str, Tensor]
) -> None:
    """Refuse an adapter or a base with tensors that do not fit the model, or that lack some.

    Raises:
        UserError: `adapter-tensor-unknown`, `adapter-tensor-shape`, `base-weight-missing`, `base-weight-shape` or
            `base-weight-type`, for the first ten.
    """
    problems = []
    given = "--adapter", adapter.folder
    every = model.state_dict()
    for name, stored in adapter.whole.items():
        found = adapter.tensors.shapes[stored]
        if name not in every:
            problems.append(problem("adapter-tensor-unknown", *given, tensor=stored))
        elif found != tuple(every[name].shape):
            wanted = tuple(every[name].shape)
            problems.append(problem("adapter-tensor-shape", *given, tensor=stored, found=found, wanted=wanted))
    for module in adapter.matrices:
        name = f"{module}.weight"
        if name not in every:
            problems.append(problem("adapter-tensor-unknown", *given, tensor=module))
            continue
        wanted, found = tuple(_oriented(model, name, every[name]).shape), adapter.shape(module)
        if found != wanted:
            problems.append(problem("adapter-tensor-shape", *given, tensor=module, found=found, wanted=wanted))
    for name, tensor in state.items():
        if name in adapter.whole:
            continue
        source = sources.get(name, name)
        if source not in base.shapes:
            problems.append(problem("base-weight-missing", "--base_model", tensor=name))
        elif base.shapes[source] != tuple(tensor.shape):
            found, wanted = base.shapes[source], tuple(tensor.shape)
            problems.append(problem("base-weight-shape", "--base_model", tensor=name, found=found, wanted=wanted))
        elif tensor.is_floating_point() and base.dtypes.get(source, torch.bfloat16) not in READABLE:
            problems.append(problem("base-weight-type", "--base_model", tensor=name, found=base.dtypes[source]))
    if problems:
        raise UserError(problems=problems[:MOST_PROBLEMS])


def _dequantised(weight: Tensor, settings: BitsAndBytesConfig) -> Tensor:
    """A weight quantised to 4 bit and back, as bitsandbytes' linear layer does it."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # slow to import

    rounded, state = quantize_4bit(
        weight.contiguous(),
        blocksize=64,
        compress_statistics=settings.bnb_4bit_use_double_quant,
        quant_type=settings.bnb_4bit_quant_type,
        quant_storage=settings.bnb_4bit_quant_storage,
    )
    dequantised: Tensor = dequantize_4bit(rounded, state)
    return dequantised


def _oriented(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Transpose a weight if its module stores it as [inputs, outputs]: the merge computes with [outputs, inputs]."""
    module = model.get_submodule(name.removesuffix(".weight"))
    return weight.T if isinstance(module, nn.Embedding | Conv1D) else weight
