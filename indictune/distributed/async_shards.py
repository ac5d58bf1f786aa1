"""Writes a rank's shards of weights and optimizer states from copies, so that the training can go on meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
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

from indictune.config.plan import Launch
from indictune.distributed import collectives
from indictune.distributed.convert_state import STATE_SHARDS, WEIGHT_SHARDS
from indictune.errors import UserError
from indictune.progress import HERE

SHARDED = "SHARDED_STATE_DICT"
_ITS_NUMBER = "3"  # which accelerate takes too

Shards = dict[str, dict[str, Any]]


def check_kept_in_shards(launch: Launch, environ: Mapping[str, str], args: TrainingArguments | None = None) -> None:
    """Refuse to train where FSDP's checkpoints are no shards: another launch, or the same with shards, would look for
    files of other names (accelerate 1.15 writes `optimizer.bin`, and the Trainer 5.23 reads `optimizer.pt`).

    Args:
        launch: what the launcher asked for.
        environ: of the process, in which accelerate tells how FSDP saves.
        args: of the run, where they are known yet: `--fsdp` and `--fsdp_config` come before that.

    Raises:
        UserError: they are kept otherwise.
    """
    by_flags = None if args is None else args.fsdp_plugin_args
    told = environ.get("FSDP_STATE_DICT_TYPE") if by_flags is None else by_flags["state_dict_type"]
    kind = str(told or SHARDED)
    if launch.family == "fsdp2" and kind.upper() not in (SHARDED, _ITS_NUMBER):
        name, place = "fsdp_state_dict_type", "in the accelerate config"
        if by_flags is not None:
            name, place = "--fsdp", f"""by --fsdp_config '{{"state_dict_type": "{SHARDED}"}}'"""
        raise UserError(
            f"{name}: FSDP would save a {kind}, from which no other launch could go on. Ask for {SHARDED} {place}; "
            "the final model is one file all the same."
        )


def group_of_writers(args: TrainingArguments) -> ProcessGroup | None:
    """A group in which the ranks talk beside the training's collectives. All ranks must call it.

    Without one of their own, the two would take each other's messages.
    """
    return collectives.new_cpu_group(args.ddp_timeout_delta)


def shards_of(model: nn.Module, optimizer: Optimizer) -> Shards:
    """This rank's shards of weights and optimizer states, by the folder that they go to. All ranks must call it."""
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
    """`shards_of`, copied to the CPU as they are now. All ranks must call it."""
    plainly = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    staged: Any = DefaultStager(plainly).stage(shards_of(model, optimizer))
    return dict(staged)


class ReportingWriter(FileSystemWriter):
    """Reports this rank's place when its shards are written. Within the same call it then waits for the others (torch
    2.13), and without the report nobody could name a rank that hangs."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        HERE.passed("having written its shards")
        return written


def write(shards: Shards, checkpoint: Path, group: ProcessGroup | None, writer: type[FileSystemWriter]) -> None:
    """Write the folders that accelerate's own saving would have written. All ranks of the group must call it.

    `dcp.async_save` would write one folder with one group; here are two, and what comes after belongs to it too.

    Args:
        shards: from `shards_of` or `copied`.
        checkpoint: folder.
        group: of the ranks; None for the training's own.
        writer: of the files.

    Raises:
        CheckpointException: a rank could not write; all ranks learn of it.
    """
    for name, state in shards.items():
        save(state, storage_writer=writer(checkpoint / name), process_group=group)
