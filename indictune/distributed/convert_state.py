"""Loads a checkpoint that is in shards into a run that keeps its state whole, and the other way round.

A run on one process or under DDP writes `model.safetensors` (or an adapter) and `optimizer.pt`; under FSDP2 every rank
writes its shards, as torch.distributed.checkpoint (DCP) keeps them. Both hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from indictune.errors import UserError
from indictune.models.active_vocabulary import active_embedding
from indictune.models.weight_files import Checkpoint, weights_files

WEIGHT_SHARDS = f"{FSDP_MODEL_NAME}_0"
STATE_SHARDS = f"{OPTIMIZER_NAME}_0"
_WHOLE_STATES = "optimizer.pt"


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load the weights of a checkpoint in place, whole or in shards. All ranks must call it.

    Args:
        model: without DDP around it, in shards or whole. Of an adapted model, only the adapter is loaded.
        checkpoint: folder.

    Raises:
        RuntimeError: the checkpoint lacks a weight, or has it in another shape.
    """
    weights = _weights(model)
    if (checkpoint / WEIGHT_SHARDS).is_dir():
        _load_shards(checkpoint / WEIGHT_SHARDS, {"model": weights})
        return
    adapted = isinstance(model, PeftModel)
    files = [checkpoint / SAFETENSORS_WEIGHTS_NAME] if adapted else weights_files(checkpoint, str(checkpoint))
    stored = Checkpoint(files)
    missing = sorted(weights.keys() - stored.shapes.keys())
    if missing:
        raise RuntimeError(f"{checkpoint}: the saved weights lack {', '.join(missing[:3])}.")
    for name, weight in weights.items():
        weight.copy_(_split_like(weight, _used_rows(model, name, stored.read(name)), name))


def load_states(model: nn.Module, optimizer: Optimizer, checkpoint: Path, is_foreign: bool = True) -> None:
    """Load the optimizer's states that are in shards, or go to shards. All ranks must call it.

    Args:
        model: as for `load_weights`.
        optimizer: of the model, as torch made it.
        checkpoint: folder.
        is_foreign: whether only one of checkpoint and run is in shards.

    Raises:
        UserError: the states are of another optimizer, or of one whose states cannot be split as weights are.
    """
    mine = get_optimizer_state_dict(model, optimizer)  # a fresh optimizer's, which it makes
    shards = checkpoint / STATE_SHARDS
    if shards.is_dir():
        stored = FileSystemReader(shards).read_metadata().state_dict_metadata
        if is_foreign:
            _check_names(optimizer, (name for name in stored if name.startswith("optimizer.state.")), checkpoint)
        _load_shards(shards, {"optimizer": mine})
        set_optimizer_state_dict(model, optimizer, mine)
        return
    # Both have the parameters in the model's order. Mapped, so that only what is taken comes into memory.
    whole = torch.load(checkpoint / _WHOLE_STATES, map_location="cpu", mmap=True, weights_only=True)
    _check_names(optimizer, (name for state in whole["state"].values() for name in state), checkpoint)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in whole["state"].items():
        whole["state"][number] = {
            name: _split_like(parameters[number], value, name) if value.dim() else value.clone()
            for name, value in state.items()
        }
    optimizer.load_state_dict(whole)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """What checkpoints hold of a model: its weights by name, each once; of an adapted model the adapter's.

    Writing to them writes to the model.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if isinstance(model, PeftModel):
        state = get_peft_model_state_dict(model, state, adapter_name=model.active_adapter)
    first_names = {id(weight): name for name, weight in reversed(state.items())}  # tied ones have several
    return {name: weight.detach() for name, weight in state.items() if first_names[id(weight)] == name}


def _used_rows(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The rows that are trained, of an embedding that is saved with all rows."""
    active = active_embedding(model)
    return weight[active[1].row_ids] if active is not None and active[0] == name else weight


def _split_like(target: Tensor, whole: Tensor, name: str) -> Tensor:
    """A whole tensor as another one is kept: this rank's part, if that is in shards."""
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


def _check_names(optimizer: Optimizer, stored: Iterable[str], checkpoint: Path) -> None:
    """Refuse the states of another optimizer, and those that have no weight's shape.

    Args:
        optimizer: with states.
        stored: names of the saved states, with or without what they belong to before the last dot.
        checkpoint: that they are of.

    Raises:
        UserError: they do not fit.
    """
    states = [(parameter, name, state) for parameter, each in optimizer.state.items() for name, state in each.items()]
    mine = {name for _, name, _ in states}
    theirs = {name.rpartition(".")[2] for name in stored}
    sized = [(weight, name, state) for weight, name, state in states if isinstance(state, Tensor) and state.dim()]
    odd = {name for weight, name, state in sized if state.shape != weight.shape}
    if mine == theirs and not odd:
        return
    found = ", ".join(sorted(theirs)) or "no states"
    wanted = ", ".join(sorted(mine)) or "none"
    why = f"{', '.join(sorted(odd))} cannot be split as weights are" if odd else f"--optim has {wanted}"
    raise UserError(
        f"--resume_from_checkpoint {checkpoint}: it was written under another strategy, with an optimizer that has "
        f"{found}, and here {why}. Give the --optim of its recipe.yaml if that is another one, or go on under the "
        "strategy that wrote it."
    )
