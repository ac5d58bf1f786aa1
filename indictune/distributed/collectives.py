"""Collectives of Python objects. Each one also records that this rank passed it, for the watchdog."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.progress import OWN_PROGRESS

T = TypeVar("T")

NEW_GROUP = "making a group of ranks"
LONG_WAIT = "waiting for the others, however long they take"


def gather_from_all(mine: T, group: ProcessGroup | None = None) -> list[T]:
    """Each rank's object, by rank. All ranks of `group` must call it; None is the group of all ranks."""
    if not torch.distributed.is_initialized():
        return [mine]
    _record_meeting(group)
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, mine, group=group)
    return parts


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of `group`; None is the group of all ranks."""
    if torch.distributed.is_initialized():
        _record_meeting(group)
        torch.distributed.barrier(group)


def from_rank_0(mine: T, long_wait: ProcessGroup | None) -> T:
    """Rank 0's object, on all ranks, after a wait of any length. `long_wait` comes from `long_wait_group`."""
    if long_wait is None:
        return mine
    OWN_PROGRESS.passed(LONG_WAIT)
    return gather_from_all(mine, long_wait)[0]


def long_wait_group(args: TrainingArguments) -> ProcessGroup | None:
    """A group of all ranks in which a wait may last 12 hours; None in a run of one process.

    All ranks must call it, before the long work begins: a rank that waits in the group notices at once when another
    rank ends, but no rank notices that while the group is made.
    """
    return new_cpu_group(timedelta(hours=12)) if args.world_size > 1 else None


def new_cpu_group(timeout: timedelta, ranks: list[int] | None = None) -> ProcessGroup:
    """A gloo group apart from the training's own, of all ranks or of `ranks`. All ranks must call it.

    `timeout` limits both making the group and each of its collectives.
    """
    OWN_PROGRESS.passed(NEW_GROUP)
    group: ProcessGroup = torch.distributed.new_group(ranks, backend="gloo", timeout=timeout)
    _record_meeting(None)
    return group


def _record_meeting(group: ProcessGroup | None) -> None:
    """Count the meeting only if all ranks take part: ranks with different counts look as if one held up the others."""
    if group is None:
        OWN_PROGRESS.passed("meeting the other ranks")
