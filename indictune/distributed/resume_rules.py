"""Which launch can go on with the state of a run that another one started, and what to type where it cannot."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from indictune.config.plan import Launch, family_of
from indictune.credentials import FIELD, holds_token
from indictune.distributed.async_shards import check_async_save
from indictune.distributed.communication import check_communication
from indictune.distributed.deepspeed_config import check_bad_steps
from indictune.errors import UserError

# Each of these goes on with the checkpoints of the others, on any number of processes (`convert_state`). ZeRO's
# states have no such way out: DeepSpeed's universal checkpoints were 8e-4 off in loss after 20 steps (0.19.8).
_INTERCHANGEABLE = frozenset({"single", "ddp", "fsdp2"})

# Strategies that offload, of which `accelerate_configs/` has a file.
OFFLOADING = ("fsdp2_offload", "zero2_offload", "zero3_offload")

# The last follows from the number of processes.
_FLAGS_OF_LAUNCHES = ("--deepspeed", "--local_rank", "--fsdp", "--gradient_accumulation_steps")
_TOKEN = f"--{FIELD}"
_PORT = "29500"


def can_go_on(strategy: str, world_size: int, launch: Launch) -> bool:
    """Whether weights and optimizer states can be carried over.

    Args:
        strategy: that wrote them; whether it offloaded them makes no difference.
        world_size: processes that wrote them.
        launch: that would go on.
    """
    family = family_of(strategy)
    if {family, launch.family} <= _INTERCHANGEABLE:
        return True
    return (family, world_size) == (launch.family, launch.world_size)


def not_carried_over(strategy: str, world_size: int, launch: Launch, optim: str | None) -> str | None:
    """The states that another launch cannot take over; None where it takes all.

    Args:
        strategy: that wrote them, and `world_size` its processes; `launch` would go on: as for `can_go_on`.
        optim: the `--optim` that wrote them; None where that is not known.
    """
    if not can_go_on(strategy, world_size, launch):
        return "ZeRO's states"
    is_split_anew = "fsdp2" in (families := {family_of(strategy), launch.family}) and len(families) > 1
    if is_split_anew and optim is not None and (optim == "adafactor" or optim.endswith(("4bit", "8bit"))):
        return f"the states of --optim {optim}, which are not split as weights are,"
    return None


def refused_flags(strategy: str, world_size: int, configuration: Mapping[str, Any]) -> dict[str, str]:
    """Flags whose values another strategy refuses, with values that it takes: for `command`.

    Args:
        strategy: that would train with them, and `world_size` its processes.
        configuration: of the run: `async_save`, `on_nonfinite` and `reduce_dtype`, and `method` where it is known.
    """
    there, flags, method = Launch(strategy, world_size), {}, configuration.get("method", "full")
    if configuration["async_save"] and _is_refused(check_async_save, there, method):
        flags["--async_save"] = "false"
    sums = {"reduce_dtype": configuration.get("reduce_dtype", "float32")}
    if _is_refused(check_communication, there, method, sums.get, world_size, None):
        flags["--reduce_dtype"] = "float32"
    if _is_refused(check_bad_steps, strategy, configuration["on_nonfinite"]):
        flags["--on_nonfinite"] = "rollback"
    return flags


def _is_refused(check: Callable[..., None], *asked: Any) -> bool:
    try:
        check(*asked)
    except UserError:
        return True
    return False


def command(
    strategy: str, world_size: int, typed: Sequence[str], launch: Launch, changed: Mapping[str, str] | None = None
) -> str:
    """What was typed, under the launcher that brings another strategy up.

    ZeRO gets the DeepSpeed file of the run that is refused, where its stage is the same; no checkpoint names its own.

    Args:
        strategy: to bring up, in the names of `accelerate_configs/`.
        world_size: its processes.
        typed: the script and its flags.
        launch: of the run that is refused.
        changed: flags with their values, in place of those that the command line or the recipe file gives.
    """
    script, *flags = typed
    family, config = family_of(strategy), strategy if strategy in OFFLOADING else family_of(strategy)
    more = dict(changed or {})
    launcher = ["python"]
    if family.startswith("zero"):
        launcher = ["torchrun", *_places(world_size, launch)]
        more["--deepspeed"] = _own_file(strategy, launch) or _beside(script, f"ds_configs/{config}.json")
    elif strategy != "single":
        file = _beside(script, f"accelerate_configs/{config}.yaml")
        launcher = ["accelerate", "launch", "--config_file", file, *_machines(world_size, launch)]
    kept = _without((*_FLAGS_OF_LAUNCHES, _TOKEN, *more), flags)
    return shlex.join([*launcher, script, *kept, *(word for flag in more.items() for word in flag)])


def doubt(strategy: str, world_size: int, launch: Launch, typed: Sequence[str]) -> str:
    """What `command` cannot know or change, in a sentence each; empty where there is nothing. Arguments as there."""
    is_zero, told = strategy.startswith("zero"), ""
    is_typed = any(each.startswith("--deepspeed") for each in typed)
    if not is_zero and launch.deepspeed_source is not None and not is_typed:
        told += " Take deepspeed out of the recipe before."
    if not _is_for_one_node(world_size, launch):
        number = "" if is_zero else " and the node's number, from 0, for RANK"
        told += f" Type it on every node, {world_size} processes in all, with the name of the first for HOST{number}."
    if is_zero and not _own_file(strategy, launch):
        told += " If it was trained with a DeepSpeed file of your own, give that one."
    return told


def _places(world_size: int, launch: Launch) -> list[str]:
    """The flags by which torchrun starts so many processes."""
    if _is_for_one_node(world_size, launch):
        return ["--nproc_per_node", str(world_size)]
    count, each = _nodes(world_size, launch)
    where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"HOST:{_PORT}"]
    return ["--nnodes", count, "--nproc_per_node", each, *where]


def _machines(world_size: int, launch: Launch) -> list[str]:
    """The flags by which accelerate starts so many processes."""
    processes = ["--num_processes", str(world_size)]
    if _is_for_one_node(world_size, launch):
        return processes
    count, _ = _nodes(world_size, launch)
    where = ["--main_process_ip", "HOST", "--main_process_port", _PORT]
    return [*processes, "--num_machines", count, "--machine_rank", "RANK", *where]


def _nodes(world_size: int, launch: Launch) -> tuple[str, str]:
    """How many, and the processes of each. No checkpoint tells how many nodes they were on: as many as it takes of
    nodes like this one."""
    here = _processes_here(launch)
    return (str(world_size // here), str(here)) if world_size % here == 0 else ("NODES", "PROCESSES")


def _is_for_one_node(world_size: int, launch: Launch) -> bool:
    is_on_one = launch.local_world_size == launch.world_size
    return world_size <= _processes_here(launch) or (is_on_one and not torch.cuda.is_available())


def _processes_here(launch: Launch) -> int:
    """Those that a node of a launch takes: one a GPU, or as many as it has of this launch."""
    return max(launch.local_world_size, torch.cuda.device_count())


def _own_file(strategy: str, launch: Launch) -> str | None:
    return launch.deepspeed_source if launch.family == family_of(strategy) else None


def _beside(script: str, name: str) -> str:
    """A file of the checkout that the script is of, as it is called where the script was typed."""
    found = os.path.normpath(Path(script).parent / os.pardir / name)
    return found if Path(found).is_file() else name


def _without(dropped: Sequence[str], words: Iterable[str]) -> Iterator[str]:
    """The flags with their values, but for some, and for what holds a token: a message would repeat it."""
    names = [name.replace("-", "_") for name in dropped]  # as a flag may be typed
    flags: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(word)
    for flag in filter(None, flags):
        if flag[0].partition("=")[0].replace("-", "_") not in names and not any(map(holds_token, flag)):
            yield from flag
