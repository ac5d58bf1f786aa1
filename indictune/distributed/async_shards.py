"""Writes a rank's shards of weights and optimizer states from copies, so that the training can go on meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed import sharding
from indictune.distributed.convert_state import STATE_SHARDS, WEIGHT_SHARDS
from indictune.errors import UserError
from indictune.progress import HERE

SHARDED = "SHARDED_STATE_DICT"
_ITS_NUMBER = "3"  # which accelerate takes too

Copies = dict[str, dict[str, Any]]


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


def check_async_save(launch: Launch, method: str) -> None:
    """Refuse `--async_save true` where no rank writes shards of all weights.

    Args:
        launch: what the launcher asked for.
        method: `--method`.

    Raises:
        UserError: why not, with the way out.
    """
    if launch.family != "fsdp2" or launch.world_size == 1:
        reason = f"this run is {launch.strategy} on {launch.world_size} process(es), whose checkpoints are no shards"
        way_out = "start it with accelerate_configs/fsdp2.yaml on several"
    elif method != "full":
        reason = f"--method {method} saves an adapter, which is too small to gain by it"
        way_out = "train with --method full"
    else:
        return
    raise UserError(f"--async_save true: {reason}. Leave it out, or {way_out}.")


def group_of_writers(args: TrainingArguments) -> ProcessGroup | None:
    """A group in which the ranks talk beside the training's collectives. All ranks must call it.

    Without one of their own, the two would take each other's messages.
    """
    return sharding.group_on_cpu(args.ddp_timeout_delta)


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


@contextmanager
def telling() -> Iterator[None]:
    """A block in which each rank passes a place when its shards are written: within the same call it then waits for
    the others (accelerate 1.15 and torch 2.13), and one that hangs would be named by none."""
    write_data = FileSystemWriter.write_data

    def telling_write_data(*args: Any) -> Any:
        written = write_data(*args)
        HERE.passed("having written its shards")
        return written

    FileSystemWriter.write_data = telling_write_data  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        FileSystemWriter.write_data = write_data  # type: ignore[method-assign]


def write(copies: Copies, checkpoint: Path, group: ProcessGroup | None) -> None:
    """Write the folders that accelerate's own saving would have written. All ranks of the group must call it.

    `dcp.async_save` would write one folder with one group; here are two, and what comes after belongs to it too.

    Raises:
        CheckpointException: a rank could not write; all ranks learn of it.
    """
    for name, state in copies.items():
        save(state, storage_writer=FileSystemWriter(checkpoint / name), process_group=group)
