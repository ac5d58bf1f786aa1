"""Write a rank's shards of weights and optimizer states, if need be from copies while the training continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from transformers import TrainingArguments

from indictune.distributed import collectives
from indictune.distributed.convert_state import STATE_SHARDS, WEIGHT_SHARDS
from indictune.progress import OWN_PROGRESS

Shards = dict[str, dict[str, Any]]


def group_of_writers(args: TrainingArguments) -> ProcessGroup | None:
    """A group apart from the training's, whose collectives run at the same time; None for one process.

    All ranks must call it.
    """
    if args.world_size == 1:
        return None
    return collectives.new_cpu_group(args.ddp_timeout_delta)


def shards_of(model: nn.Module, optimizer: Optimizer) -> Shards:
    """This rank's shards of weights and optimizer states, by folder name. All ranks must call it."""
    weights = (
        get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        if isinstance(model, PeftModel)
        else get_model_state_dict(model)
    )
    return {
        WEIGHT_SHARDS: {"model": weights},
        STATE_SHARDS: {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }


def copied(model: nn.Module, optimizer: Optimizer) -> Shards:
    """A copy of `shards_of` on the CPU. All ranks must call it."""
    plainly = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    staged: Any = DefaultStager(plainly).stage(shards_of(model, optimizer))
    return dict(staged)


class ReportingWriter(FileSystemWriter):
    """Record for the watchdog that this rank has written its shards: `save` then waits for the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        OWN_PROGRESS.passed("having written its shards")
        return written


def write(shards: Shards, checkpoint: Path, group: ProcessGroup | None, writer: type[FileSystemWriter]) -> None:
    """Write shards from `shards_of` or `copied`. All ranks of the group must call it; None is the training's own.

    Raises:
        CheckpointException: a rank could not write; all ranks learn of it.
    """
    for name, state in shards.items():
        save(state, storage_writer=writer(checkpoint / name), process_group=group)
