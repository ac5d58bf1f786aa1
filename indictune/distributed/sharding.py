"""What a sharded model needs to know of its architecture, and how it becomes one file again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from indictune.distributed.launch_check import came_up
from indictune.progress import HERE

EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def repeated_blocks(model: nn.Module) -> list[str]:
    """Class names of the layers that a model repeats: the units that FSDP gathers one at a time.

    transformers' own `_no_split_modules` would also name BERT's embeddings, which accelerate then shards a second
    time ("Expects tensor to be unsharded" or a None invariant at the first step). The repeated blocks are the members
    of a model's outermost module lists.

    Raises:
        ValueError: the model has no list of layers.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of repeated layers to shard.")
    outermost = [candidate for candidate in lists if not any(_contains(other, candidate) for other in lists)]
    return sorted({type(block).__name__ for blocks in outermost for block in blocks})


def _contains(outer: nn.ModuleList, inner: nn.ModuleList) -> bool:
    return outer is not inner and any(module is inner for module in outer.modules())


def fit_to_model(model: nn.Module, args: TrainingArguments) -> None:
    """Make one config file serve every architecture. To be called before the Trainer exists.

    Tells accelerate which classes FSDP wraps (nothing else reads it), and mends the names of saved weights. A model
    that FSDP2 splits is compiled block by block: around a model that is compiled as a whole the hooks that gather and
    free its layers never run (accelerate 1.15, `compile_regions_fsdp2`), and nothing was compiled (torch 2.13).
    """
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(repeated_blocks(model))
    if came_up(args) == "fsdp2":
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _forget_unused_renamings(module)


def _forget_unused_renamings(model: PreTrainedModel) -> None:
    """Save LayerNorms as `weight` and `bias`, as every other strategy does.

    transformers renames TensorFlow's `LayerNorm.gamma` and `LayerNorm.beta` on loading, and back on saving where the
    checkpoint had them. Its ZeRO-3 loader (5.23, `integrations/deepspeed.py`) notes the renaming as used for every
    checkpoint, and saved models get names that other programs do not know.
    """
    noted = vars(model).get("_weight_conversions")
    if noted:
        legacy = {"LayerNorm.gamma", "LayerNorm.beta"}
        vars(model)["_weight_conversions"] = [each for each in noted if not legacy & set(each.source_patterns)]


def architecture_of(model: nn.Module) -> str:
    """The name of a model's class as `config.json` has it; a split model is of a class that torch makes of it."""
    return type(model).__name__.removeprefix("FSDP")


def save_code(model: nn.Module, folder: str | Path) -> None:
    """Write the modules of a split model that has code of its own, and name its class in its configuration.

    Of a split model transformers 5.23 would write torch's files, where the class is from that FSDP2 has put in place
    of the model's own; so that class is told to have no code. Of any other model the Trainer writes what it needs.

    Args:
        model: in training, without wrappers.
        folder: of a checkpoint or a model; it is there.
    """
    own: Any = next((each for each in type(model).__mro__ if vars(each).get("_auto_class")), None)
    if own is None or own is type(model):
        return
    cast(Any, type(model))._auto_class = None
    custom_object_save(own, folder)
    plain = cast(PreTrainedModel, model)
    module = own.__module__.rpartition(".")[2]
    plain.config.auto_map = {**plain.config.auto_map, own._auto_class: f"{module}.{own.__name__}"}


def tied_once(model: nn.Module | None, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Whole weights to save, without copies of tied ones.

    Where FSDP2 gathers them, one that has two names becomes two tensors, and transformers (5.23,
    `remove_tied_weights_from_state_dict`) leaves out a second name of the same memory alone.

    Args:
        model: whose weights they are, bare or as a strategy wraps it.
        state: weights by name; None where the model has them whole.
    """
    if not state or not isinstance(model, PreTrainedModel):
        return state
    copies = {
        name
        for name, origin in model.all_tied_weights_keys.items()
        if name in state and origin in state and torch.equal(state[name], state[origin])
    }
    return {name: weight for name, weight in state.items() if name not in copies}


def bare(trainer: Trainer) -> nn.Module:
    """The model in training without what a strategy or the compiler has put around it: parameters have their names."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return model


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape that each parameter has when it is whole, also where this rank holds a part of it."""
    # A DTensor's shape is that of the whole; ZeRO-3 leaves an empty tensor, and notes the shape beside it.
    return {name: tuple(vars(each).get("ds_shape", each.shape)) for name, each in model.named_parameters()}


def held_part(parameter: nn.Parameter) -> torch.Tensor:
    """The part of a parameter that this rank holds."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    known = vars(parameter)
    if "ds_tensor" not in known:
        return parameter
    # ZeRO-3 leaves an empty tensor, and keeps the rank's part beside it. Parts are of one size: the last ranks' end in
    # whatever was in the memory (DeepSpeed 0.19, `_partition_param`), and that may be NaN.
    part: torch.Tensor = known["ds_tensor"]
    own = known["ds_numel"] - known["ds_zero_partition_rank"] * part.numel()
    return part[: max(0, own)]


def whole_norms(trainer: Trainer) -> dict[str, float]:
    """The Euclidean length of each trained parameter when it is whole. All ranks must call it."""
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        # ZeRO-3 has begun to gather parameters for a step that never comes, which then cannot be gathered ("Cannot
        # partition a param in flight", DeepSpeed 0.19.8, after a run that went on from a checkpoint).
        engine: Any = trainer.model_wrapped
        engine.empty_partition_cache()
    norms = {}
    for name, each in bare(trainer).named_parameters():
        if not each.requires_grad:
            continue
        with gathered(each):
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            norms[name] = float(whole.detach().double().norm())
    return norms


@contextmanager
def gathered(parameter: torch.Tensor) -> Iterator[None]:
    """A block in which a parameter that ZeRO-3 has split is whole, to be read. All ranks must enter it."""
    if "ds_shape" in vars(parameter):
        import deepspeed  # slow

        with deepspeed.zero.GatheredParameters([parameter]):
            yield
    else:
        yield


@contextmanager
def reading_weights(args: TrainingArguments) -> Iterator[bool]:
    """A block in which a model's weights are read; it yields whether this process has to.

    With `fsdp_cpu_ram_efficient_loading`, accelerate sends rank 0's weights to all when the model is split. All ranks
    must enter it.
    """
    HERE.passed("reading the weights")
    with _unseen_by_transformers() as is_efficient:
        yield not is_efficient or args.process_index == 0
    HERE.passed("making the trainer")


@contextmanager
def _unseen_by_transformers() -> Iterator[bool]:
    """A block in which transformers is not told of `fsdp_cpu_ram_efficient_loading`; it yields whether that is on.

    Of transformers' own way (5.23) only the faults are left, since every rank reads all weights, and those that the
    checkpoint lacks are without data on all ranks but one ("KeyError" when such an optimizer is saved).
    """
    before = os.environ.pop(EFFICIENT, None)
    try:
        yield before == "true"
    finally:
        if before is not None:
            os.environ[EFFICIENT] = before


@contextmanager
def loading_alone(args: TrainingArguments) -> Iterator[None]:
    """A block in which one rank reads a model for itself: no weights are split, and no other rank is waited for."""
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    try:
        with _unseen_by_transformers():
            yield
    finally:
        config = vars(args).get("hf_deepspeed_config")  # only there where DeepSpeed is used
        if config is not None:
            set_hf_deepspeed_config(config)  # type: ignore[no-untyped-call]


def prepare_for_evaluation(trainer: Trainer) -> None:
    """Shard a model that is only evaluated.

    accelerate 1.15 shards a model for FSDP2 only together with an optimizer, and `Trainer.evaluate` has none:
    "a model and optimizer must be passed together". An optimizer without states, which never steps, will do.
    """
    accelerator, model = trainer.accelerator, trainer.model
    if accelerator.distributed_type == DistributedType.FSDP and model is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer.model = trainer.model_wrapped = accelerator.prepare(model, optimizer)[0]


def name_of(accelerator: Accelerator, asked: str) -> str:
    """The strategy that a run has really used, in the names of `accelerate_configs/`.

    Args:
        accelerator: of the Trainer that ran.
        asked: the strategy of the launch, which tells what the accelerator does not: where states are offloaded.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        family = f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    elif accelerator.distributed_type == DistributedType.FSDP:
        family = "fsdp2"
    else:
        family = "single" if accelerator.distributed_type == DistributedType.NO else "ddp"
    return asked if asked.removesuffix("_offload") == family else family
