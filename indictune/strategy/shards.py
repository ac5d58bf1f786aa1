"""Writes a rank's shards of weights and optimizer states from copies, so that the training can go on meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import TrainingArguments

from indictune.errors import UserError
from indictune.strategy.conversion import STATE_SHARDS, WEIGHT_SHARDS
from indictune.strategy.launch import Launch

Copies = dict[str, dict[str, Any]]


def check_async_save(launch: Launch, method: str, environ: Mapping[str, str]) -> None:
    """Refuse `--async_save true` where no rank writes shards of all weights.

    Args:
        launch: what the launcher asked for.
        method: `--method`.
        environ: of the process, in which accelerate tells how FSDP saves.

    Raises:
        UserError: why not, with the way out.
    """
    kind = environ.get("FSDP_STATE_DICT_TYPE") or "SHARDED_STATE_DICT"
    if launch.family != "fsdp2" or launch.world_size == 1:
        reason = f"this run is {launch.strategy} on {launch.world_size} process(es), whose checkpoints are no shards"
        way_out = "start it with accelerate_configs/fsdp2.yaml on several"
    elif method != "full":
        reason = f"--method {method} saves an adapter, which is too small to gain by it"
        way_out = "train with --method full"
    elif kind != "SHARDED_STATE_DICT":
        reason = f"fsdp_state_dict_type is {kind}, and only shards are written beside the training"
        way_out = "set it to SHARDED_STATE_DICT"
    else:
        return
    raise UserError(f"--async_save true: {reason}. Leave it out, or {way_out}.")


def group_of_writers(args: TrainingArguments) -> ProcessGroup | None:
    """A group in which the ranks talk beside the training's collectives. All ranks must call it.

    Without one of their own, the two would take each other's messages.
    """
    group: ProcessGroup | None = torch.distributed.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
    return group


def copied(model: nn.Module, optimizer: Optimizer) -> Copies:
    """This rank's shards as they are now, copied to the CPU; by the folder that they go to. All ranks must call it."""
    states = {
        WEIGHT_SHARDS: {"model": get_model_state_dict(model)},
        STATE_SHARDS: {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }
    plainly = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    staged: Any = DefaultStager(plainly).stage(states)
    return dict(staged)


def write(copies: Copies, checkpoint: Path, group: ProcessGroup | None) -> None:
    """Write the folders that accelerate's own saving would have written. All ranks of the group must call it.

    `dcp.async_save` would write one folder with one group; here are two, and what comes after belongs to it too.

    Raises:
        CheckpointException: a rank could not write; all ranks learn of it.
    """
    for name, state in copies.items():
        save(state, storage_writer=FileSystemWriter(checkpoint / name), process_group=group)
