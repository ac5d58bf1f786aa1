"""Load a checkpoint into a run of another strategy: one keeps its state whole and the other in shards."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from indictune.models.active_vocabulary import active_embedding
from indictune.models.trusted_files import weights_files

WEIGHT_SHARDS = f"{FSDP_MODEL_NAME}_0"
STATE_SHARDS = f"{OPTIMIZER_NAME}_0"
WHOLE_STATES = "optimizer.pt"

State = dict[str, Any]


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights, whole or in shards, into an unwrapped model. All ranks must call it.

    Of an adapted model, only the adapter is loaded.

    Raises:
        RuntimeError: the checkpoint lacks a weight, or has it in another shape.
    """
    weights = own_weights(model)
    if (checkpoint / WEIGHT_SHARDS).is_dir():
        _load_shards(checkpoint / WEIGHT_SHARDS, {"model": weights})
        return
    adapted = isinstance(model, PeftModel)
    files = [checkpoint / SAFETENSORS_WEIGHTS_NAME] if adapted else weights_files(checkpoint, str(checkpoint))
    stored = {name: weight for file in files for name, weight in load_file(file).items()}  # memory-mapped
    missing = sorted(weights.keys() - stored.keys())
    if missing:
        raise RuntimeError(f"{checkpoint}: the saved weights lack {', '.join(missing[:3])}.")
    active = active_embedding(model)
    for name, weight in weights.items():
        whole = stored[name]
        if active is not None and name == active[0]:
            whole = whole[active[1].row_ids]  # saved with all rows
        weight.copy_(split_like(weight, whole, name))


def load_states(
    model: nn.Module,
    optimizer: Optimizer,
    checkpoint: Path,
    decayed: Collection[str],
    own_part: Callable[[State], State] | None = None,
) -> None:
    """Load a checkpoint's optimizer states, whole or in shards. All ranks must call it.

    Args:
        model: unwrapped.
        optimizer: without accelerate's wrapper. Its groups may be those of the checkpoint, divided by device mesh: the
            Trainer (5.23) does so where some weights are split and others whole.
        checkpoint: to load from.
        decayed: names of the parameters that weight decay applies to; they come first in whole states.
        own_part: takes this rank's part of whole states; None if the rank has all parameters.
    """
    shards = checkpoint / STATE_SHARDS
    if shards.is_dir():
        states: State = get_optimizer_state_dict(model, optimizer)  # makes those of a new optimizer
        stored = {"state": states["state"], "param_groups": _groups_in(shards)}
        _load_shards(shards, {"optimizer": stored})
        names = [group["params"] for group in states["param_groups"]]
        groups = _divided(stored["param_groups"], names, decayed)
        set_optimizer_state_dict(model, optimizer, stored | {"param_groups": groups})
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    into_shards = any(isinstance(each, DTensor) for each in parameters)
    device = "cpu" if into_shards else parameters[0].device
    # Mapped, so that each rank reads only its part.
    whole = torch.load(checkpoint / WHOLE_STATES, map_location=device, mmap=into_shards, weights_only=True)
    if own_part is not None:
        whole = own_part(whole)
    if into_shards:
        _split_states(whole, model, optimizer, decayed)
    optimizer.load_state_dict(whole)


def _split_states(whole: State, model: nn.Module, optimizer: Optimizer, decayed: Collection[str]) -> None:
    """Replace whole states by this rank's parts, in the groups of its optimizer."""
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    in_order = sorted(named, key=lambda name: name not in decayed)  # as one process numbers them
    name_of = {id(each): name for name, each in named.items()}
    names = [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    groups = _divided(whole["param_groups"], names, decayed)
    number_of = {name: number for number, name in enumerate(in_order)}
    whole["param_groups"] = [{**each, "params": [number_of[name] for name in each["params"]]} for each in groups]
    for number, state in whole["state"].items():
        like = named[in_order[number]]
        whole["state"][number] = {
            name: split_like(like, value, name) if value.dim() else value.clone() for name, value in state.items()
        }


def fit_schedule(schedule: dict[str, Any], groups: int) -> dict[str, Any]:
    """The state of a schedule for another number of parameter groups, which all have the same learning rate."""
    per_group = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
    return schedule | {name: schedule[name][:1] * groups for name in per_group if name in schedule}


def _groups_in(shards: Path) -> list[dict[str, Any]]:
    """The parameter groups in shards, with settings that are to be read."""
    paths = FileSystemReader(shards).read_metadata().planner_data.values()
    settings = [
        (number, name)
        for _, kind, number, name in (each[:4] for each in paths if len(each) > 3)
        if kind == "param_groups"
    ]
    groups = [dict[str, Any]() for _ in {number for number, _ in settings}]
    for number, name in settings:
        groups[number][name] = None
    return groups


def _divided(stored: list[State], names: list[list[str]], decayed: Collection[str]) -> list[State]:
    """Groups of these parameters with the stored settings: the first group decays, the last does not."""
    return [{**stored[0 if own and own[0] in decayed else -1], "params": own} for own in names]


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's own weights by name, each once, as checkpoints hold them; of an adapted model the adapter's."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if isinstance(model, PeftModel):
        state = get_peft_model_state_dict(model, state, adapter_name=model.active_adapter)
    first_names = {id(weight): name for name, weight in reversed(state.items())}  # tied ones have several
    return {name: weight.detach() for name, weight in state.items() if first_names[id(weight)] == name}


def split_like(target: Tensor, whole: Tensor, name: str) -> Tensor:
    """This rank's part of a whole tensor where `target` is in shards; else the whole tensor."""
    if whole.shape != target.shape:
        raise RuntimeError(f"{name} has the shape {tuple(whole.shape)} instead of {tuple(target.shape)}.")
    if not isinstance(target, DTensor):
        return whole
    # Each rank has the whole, so that none has to send it.
    return distribute_tensor(
        whole.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
    )


def _load_shards(folder: Path, into: dict[str, Any]) -> None:
    load(into, storage_reader=FileSystemReader(folder), no_dist=not torch.distributed.is_initialized())


_MODEL = "model."  # the first word of each name (accelerate 1.15, `save_fsdp_model`)
_DEEPSPEED = "latest"  # names the folder with ZeRO's parts


def is_in_parts(checkpoint: Path) -> bool:
    """Whether a checkpoint is in shards. Reading them can run code: they are pickles, or their index is one."""
    return (checkpoint / WEIGHT_SHARDS).is_dir() or (checkpoint / _DEEPSPEED).is_file()


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights by name, on the CPU, as they are trained: ZeRO's in fp32, of an active vocabulary the trained rows.

    Args:
        checkpoint: in shards, and trusted.
    """
    if (checkpoint / WEIGHT_SHARDS).is_dir():
        return _from_shards(checkpoint / WEIGHT_SHARDS)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # slow to import

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints what it does
        weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    return weights


def _from_shards(folder: Path) -> dict[str, Tensor]:
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata)
    }
    try:
        load(weights, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # torch's own (2.13), around anything, a request to stop among it
        raise next(iter(error.failures.values()))[0] from None
    return {name.removeprefix(_MODEL): weight for name, weight in weights.items()}
