"""Which launch can go on with the state of a run that another one started, and what to type where it cannot."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from indictune.strategy.launch import Launch, family_of

# Each of these goes on with the checkpoints of the others, on any number of processes (`strategy.conversion`). ZeRO's
# states have no such way out: DeepSpeed's universal checkpoints were 8e-4 off in loss after 20 steps (0.19.8).
_INTERCHANGEABLE = frozenset({"single", "ddp", "fsdp2"})

# Strategies that offload, of which `accelerate_configs/` has a file.
OFFLOADING = ("fsdp2_offload", "zero2_offload", "zero3_offload")

# The last follows from the number of processes.
_FLAGS_OF_LAUNCHES = ("--deepspeed", "--local_rank", "--fsdp", "--gradient_accumulation_steps")
_MICRO_BATCH = "--per_device_train_batch_size"


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


def command(strategy: str, world_size: int, typed: Iterable[str], per_device_batch_size: int | None = None) -> str:
    """What was typed, under the launcher that brings another strategy up.

    Args:
        strategy: to bring up, in the names of `accelerate_configs/`.
        world_size: its processes.
        typed: the script and its flags.
        per_device_batch_size: in place of the one that was given, where that does not fit; None leaves it.
    """
    dropped = (*_FLAGS_OF_LAUNCHES, *([] if per_device_batch_size is None else [_MICRO_BATCH]))
    launcher = ["python"]
    if strategy != "single":
        config = f"accelerate_configs/{strategy if strategy in OFFLOADING else family_of(strategy)}.yaml"
        launcher = ["accelerate", "launch", "--config_file", config, "--num_processes", str(world_size)]
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word in dropped:
            next(words, None)  # its value
        elif word.partition("=")[0] not in dropped:
            kept.append(word)
    if per_device_batch_size is not None:
        kept += [_MICRO_BATCH, str(per_device_batch_size)]
    return shlex.join([*launcher, *kept])
