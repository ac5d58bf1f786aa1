"""Start the process group: on gloo without an accelerator (the CPU fallback), and again after each restart."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from indictune.config.plan import Launch
from indictune.distributed import strategy, zero
from indictune.distributed.elastic import most_restarts
from indictune.distributed.launch import engine_of
from indictune.distributed.upstream import set_default_timeout, set_distributed_type
from indictune.errors import UserError
from indictune.run import OWN_PROGRESS

JOINING = "joining the other ranks"
_LOOK_EVERY_S = 0.05


def join(environ: Mapping[str, str], backend: str | None, timeout_s: int) -> None:
    """Start the process group where torchrun may restart the run. Otherwise the first user of a group starts it.

    torchrun (torch 2.13) keeps one store through all restarts, in which ranks find the addresses of dead processes
    ("Gloo connectFullMesh failed ... Connection refused"; pytorch issue 135712). So each start has its own key prefix.

    Raises:
        UserError: the other ranks are not at the address that torchrun gave.
    """
    OWN_PROGRESS.passed(JOINING)
    if not most_restarts(environ):
        return
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        name = agree_on_name(store, rank, world_size, timeout)
    except (DistNetworkError, DistStoreError) as error:
        address = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
        raise UserError("ranks-not-found", value=address, seconds=timeout_s) from error
    torch.distributed.init_process_group(
        backend, store=PrefixStore(name, store), rank=rank, world_size=world_size, timeout=timeout
    )


def agree_on_name(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A new name that rank 0 gives to the ranks of this start.

    The store may hold what earlier starts wrote. So each rank asks with a name of its own, and waits for the answer to
    that. Rank 0 answers all that ask until each rank of this start has its answer; nobody reads an answer to the dead.

    Raises:
        DistStoreError: a rank did not come.
    """
    mine = uuid.uuid4().hex
    if rank != 0:
        store.set(f"asks/{rank}", mine)
        store.wait([f"answer/{mine}"], timeout)
        name = str(store.get(f"answer/{mine}").decode())
        store.set(f"here/{name}/{rank}", "")
        return name
    deadline = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world_size))
    while missing:
        if time.monotonic() > deadline:
            raise DistStoreError(f"ranks {sorted(missing)} did not come")
        for asks in (f"asks/{each}" for each in missing):
            if store.check([asks]):
                store.set(f"answer/{store.get(asks).decode()}", mine)
        missing = {each for each in missing if not store.check([f"here/{mine}/{each}"])}
        time.sleep(_LOOK_EVERY_S)
    return mine


def start_process_group(launch: Launch, environ: MutableMapping[str, str], timeout_s: int) -> dict[str, Any]:
    """Start the process group where the Trainer would not: after a restart, and on a machine without a GPU.

    Returns:
        Training arguments that the CPU fallback and the strategy file need.
    """
    from_file = strategy.hide_file_values(launch, environ)
    if launch.world_size > 1:
        set_default_timeout(timedelta(seconds=timeout_s))
    is_on_cpu = not torch.accelerator.is_available()
    if engine_of(launch.strategy).startswith("zero"):
        if is_on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # now already: it says which operators there are
        zero.load_operators(launch)
    join(environ, "gloo" if is_on_cpu else None, timeout_s)
    return from_file | (start_on_gloo(launch, timeout_s) if is_on_cpu else {})


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
