"""Which launch can resume the state of a run that another launch started."""

from __future__ import annotations

from indictune.config.plan import Launch
from indictune.distributed.engines import engine_of

# Each of these resumes the checkpoints of the others, on any number of processes (`convert_state`). ZeRO's states
# cannot be converted: DeepSpeed's universal checkpoints were 8e-4 off in loss after 20 steps (0.19.8).
_INTERCHANGEABLE = frozenset({"single", "ddp", "fsdp2", "tp"})

# A pattern of flags that say how a run is distributed, which changes no step.
FLAGS_OF_STRATEGIES = "(ddp|fsdp)(_.*)?|pipeline_schedule"


def can_resume(strategy: str, world_size: int, launch: Launch) -> bool:
    """Whether `launch` can load weights and optimizer states that `world_size` processes of `strategy` wrote."""
    family = engine_of(strategy)
    if {family, engine_of(launch.strategy)} <= _INTERCHANGEABLE:
        return True
    is_split, was_split = (each.endswith("_tp") for each in (launch.strategy, strategy))  # by DeepSpeed
    return (family, world_size, was_split) == (engine_of(launch.strategy), launch.world_size, is_split)


def not_carried_over(strategy: str, world_size: int, launch: Launch, optim: str | None) -> str | None:
    """The states that `launch` cannot take over, as for `can_resume`; None where it takes all.

    `optim` is the `--optim` that wrote them; None if it is not known.
    """
    if not can_resume(strategy, world_size, launch):
        return "ZeRO's states"
    families = {engine_of(strategy), engine_of(launch.strategy)}
    is_split_anew = bool(families & {"fsdp2", "tp"}) and len(families) > 1
    if is_split_anew and optim is not None and (optim == "adafactor" or optim.endswith(("4bit", "8bit"))):
        return f"the states of --optim {optim}, which are not split as weights are,"
    return None
