"""Which launch can resume the state of a run that another launch started."""

from __future__ import annotations

import re
from collections.abc import Iterable

from indictune.config.plan import Launch
from indictune.distributed.engines import engine_of

# Each of these resumes the checkpoints of the others, on any number of processes (`convert_state`). ZeRO's states
# cannot be converted: DeepSpeed's universal checkpoints were 8e-4 off in loss after 20 steps (0.19.8).
_INTERCHANGEABLE = frozenset({"single", "ddp", "fsdp2", "tp"})

# A pattern of flags that say how a run is distributed, which changes no step.
FLAGS_OF_STRATEGIES = "(ddp|fsdp)(_.*)?|pipeline_schedule"


# The files of a checkpoint in which DeepSpeed (0.19.8) keeps the parts of matrices, one for each rank of a group.
_PART = re.compile(r"mp_rank_(\d+)_model_states")


def parts_of_matrices(files: Iterable[str]) -> int:
    """Into how many parts DeepSpeed split the matrices of a checkpoint, by the names of its files; 1 if it did not."""
    found = [int(part[1]) for part in map(_PART.search, files) if part]
    return max(found, default=0) + 1


def can_resume(strategy: str, world_size: int, launch: Launch, parts: int = 1) -> bool:
    """Whether `launch` can load weights and optimizer states that `world_size` processes of `strategy` wrote.

    `parts` is `parts_of_matrices` of the checkpoint.
    """
    family = engine_of(strategy)
    if {family, engine_of(launch.strategy)} <= _INTERCHANGEABLE:
        return True
    return (family, world_size, parts) == (engine_of(launch.strategy), launch.world_size, launch.axes.tensor)


def not_carried_over(strategy: str, world_size: int, launch: Launch, optim: str | None, parts: int = 1) -> str | None:
    """The states that `launch` cannot take over, as for `can_resume`; None where it takes all.

    `optim` is the `--optim` that wrote them; None if it is not known.
    """
    if not can_resume(strategy, world_size, launch, parts):
        return "ZeRO's states"
    families = {engine_of(strategy), engine_of(launch.strategy)}
    is_split_anew = bool(families & {"fsdp2", "tp"}) and len(families) > 1
    if is_split_anew and optim is not None and (optim == "adafactor" or optim.endswith(("4bit", "8bit"))):
        return f"the states of --optim {optim}, which are not split as weights are,"
    return None
