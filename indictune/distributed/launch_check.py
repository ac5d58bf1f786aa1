"""Whether the strategy that the launcher asked for came up."""

from __future__ import annotations

import torch
from accelerate.state import DistributedType
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.engines import engine_of
from indictune.errors import UserError


def check_came_up(launch: Launch, training_args: TrainingArguments) -> None:
    """Compare what the launcher asked for with what came up, before the model loads.

    Raises:
        UserError: another strategy, or another number of processes, came up.
    """
    family, asked = came_up(training_args), engine_of(launch.strategy)
    if family != ("ddp" if asked == "tp" else asked):  # accelerate knows no matrices that are split without FSDP2
        raise UserError("another-strategy-came-up", value=asked, came_up=family)
    if training_args.world_size != launch.world_size:
        raise UserError("processes-do-not-meet", value=launch.world_size, came_up=training_args.world_size)


def use_one_gpu(training_args: TrainingArguments, device_map: str | None) -> list[str]:
    """Keep one process on one GPU; the Trainer would use `nn.DataParallel`. Return a sentence if GPUs stay unused.

    DataParallel averages losses over parts of a batch, and is slower than one process a GPU. `device_map` may spread
    the layers over all GPUs.
    """
    if training_args.n_gpu <= 1:
        return []
    unused = training_args.n_gpu - 1
    training_args._n_gpu = 1
    if device_map is not None:
        return []
    return [f"One process uses one GPU; {unused} more stay unused. accelerate_configs/ddp.yaml uses them all."]


def came_up(training_args: TrainingArguments) -> str:
    """The family of the strategy that came up: `single`, `ddp`, `fsdp2` or `zero<stage>`."""
    kind = training_args.distributed_state.distributed_type
    if training_args.deepspeed_plugin is not None:
        # A stage without a process group is one process that does not know the others.
        grouped = kind == DistributedType.DEEPSPEED and torch.distributed.is_initialized()
        return f"zero{training_args.deepspeed_plugin.zero_stage}" if grouped else "single"
    if kind == DistributedType.NO:
        return "single"
    asked_fsdp = training_args.fsdp_plugin_args is not None or parse_flag_from_env("ACCELERATE_USE_FSDP")
    return "fsdp2" if asked_fsdp and kind != DistributedType.MULTI_CPU else "ddp"
