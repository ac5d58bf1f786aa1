"""The CPU stand-in: on a machine without an accelerator the same command runs the same collectives over gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState

from indictune.config.plan import Launch


def is_needed() -> bool:
    """Whether this machine has no accelerator that torch can use."""
    return not torch.accelerator.is_available()


def start(launch: Launch, timeout_s: int) -> dict[str, Any]:
    """Bring the process group up on gloo, before `TrainingArguments` exists.

    Left alone, `TrainingArguments` on such a machine starts every process as a stranger to the others (FSDP, DDP), or
    works out the batch for one rank and dies (DeepSpeed). It takes over a state that is already there when told so.

    Args:
        launch: what the launcher asked for.
        timeout_s: seconds after which a collective that nobody joins fails (`--ddp_timeout`).

    Returns:
        Fields for `TrainingArguments`.
    """
    # With more threads than cores a small model ran up to 40 times slower (2 cores).
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    if launch.strategy == "single":
        return {"use_cpu": True}
    timeout = timedelta(seconds=timeout_s)
    if launch.family.startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(cpu=False, backend="gloo", timeout=timeout)
    else:
        PartialState(cpu=True, backend="gloo", timeout=timeout)
    if launch.family == "fsdp2":
        # accelerate turns on FSDP for types that name an accelerator, MULTI_GPU among them, and not for MULTI_CPU;
        # `fully_shard` itself works on gloo. The stand-in borrows the type until accelerate has read it.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        # FSDP's CPU offload policy refuses to run without an accelerator, and has nothing to offload from here.
        os.environ["FSDP_OFFLOAD_PARAMS"] = "false"
    return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}


def limits(launch: Launch) -> list[str]:
    """What the stand-in leaves out of the strategy, as sentences for the user."""
    if launch.strategy == "fsdp2_offload":
        return ["No accelerator: FSDP2 runs on the CPU without its CPU offload, which refuses to run here."]
    return []
