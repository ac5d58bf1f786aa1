"""Load a checkpoint into a run of another strategy: one keeps its state whole and the other in shards.

One process and DDP write `model.safetensors` (or an adapter) and `optimizer.pt`. Under FSDP2 every rank writes its
shards with torch.distributed.checkpoint (DCP). Both hold the same numbers.
"""

from __future__ import annotations

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

from indictune.models.active_vocabulary import active_embedding
from indictune.models.weight_files import Checkpoint, weights_files

WEIGHT_SHARDS = f"{FSDP_MODEL_NAME}_0"
STATE_SHARDS = f"{OPTIMIZER_NAME}_0"
WHOLE_STATES = "optimizer.pt"


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights in place, whole or in shards. All ranks must call it.

    Args:
        model: unwrapped, in shards or whole. Of an adapted model, only the adapter is loaded.
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


def load_states(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Load the optimizer states of a checkpoint, whole or in shards. All ranks must call it.

    Args:
        model: as for `load_weights`.
        optimizer: of the model, not wrapped by accelerate.
        checkpoint: folder.
    """
    shards = checkpoint / STATE_SHARDS
    if shards.is_dir():
        states = get_optimizer_state_dict(model, optimizer)  # makes those of a new optimizer
        _load_shards(shards, {"optimizer": states})
        set_optimizer_state_dict(model, optimizer, states)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]  # as numbered there
    into_shards = isinstance(parameters[0], DTensor)
    device = "cpu" if into_shards else parameters[0].device
    # Mapped, so that each rank reads only its part.
    whole = torch.load(checkpoint / WHOLE_STATES, map_location=device, mmap=into_shards, weights_only=True)
    if into_shards:
        for number, state in whole["state"].items():
            whole["state"][number] = {
                name: _split_like(parameters[number], value, name) if value.dim() else value.clone()
                for name, value in state.items()
            }
    optimizer.load_state_dict(whole)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's own weights by name, each once, as checkpoints hold them; of an adapted model the adapter's."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if isinstance(model, PeftModel):
        state = get_peft_model_state_dict(model, state, adapter_name=model.active_adapter)
    first_names = {id(weight): name for name, weight in reversed(state.items())}  # tied ones have several
    return {name: weight.detach() for name, weight in state.items() if first_names[id(weight)] == name}


def _used_rows(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """The trained rows of an embedding with an active vocabulary; any other weight as it is."""
    active = active_embedding(model)
    return weight[active[1].row_ids] if active is not None and active[0] == name else weight


def _split_like(target: Tensor, whole: Tensor, name: str) -> Tensor:
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
