"""The CPU fallback: without an accelerator, the same command runs the same collectives over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState

from indictune.config.plan import Launch
from indictune.distributed.launch import engine_of
from indictune.distributed.upstream import set_distributed_type


def is_needed() -> bool:
    """Whether this machine has no accelerator that torch can use."""
    return not torch.accelerator.is_available()


def start_on_gloo(launch: Launch, timeout_s: int) -> dict[str, Any]:
    """Start the process group on gloo, before `TrainingArguments` exists, and return fields for it.

    Without this state, `TrainingArguments` starts processes that do not know each other (FSDP, DDP). Under DeepSpeed
    it derives the batch for one rank and fails. `use_configured_state` makes it use the state.
    """
    # With more threads than cores a small model ran up to 40 times slower (2 cores).
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    if launch.strategy == "single":
        return {"use_cpu": True}
    timeout = timedelta(seconds=timeout_s)
    if engine_of(launch.strategy).startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(cpu=False, backend="gloo", timeout=timeout)
    else:
        PartialState(cpu=True, backend="gloo", timeout=timeout)
    if engine_of(launch.strategy) == "fsdp2":
        set_distributed_type(DistributedType.MULTI_GPU)
        # FSDP's CPU offload refuses to run without an accelerator.
        os.environ["FSDP_OFFLOAD_PARAMS"] = "false"
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
