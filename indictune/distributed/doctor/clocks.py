"""The clocks of the ranks, compared when all leave a barrier."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from indictune.distributed.collectives import barrier
from indictune.distributed.doctor.lines import Line, named

CHECK = "clocks"
ROUNDS = 5
_SIDE = {True: "ahead of", False: "behind"}
WIDE_S = 1.0  # reports of several nodes are ordered by their clocks


def readings() -> list[float]:
    """The clock of this rank after each of some barriers, in seconds since 1970. All ranks must call it."""
    found = []
    for _ in range(ROUNDS):
        barrier()
        found.append(time.time())
    return found


def clock_lines(by_rank: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[Line]:
    """Which ranks' clocks are off.

    A rank leaves a barrier late, if it is busy, and never early. The median of the rounds leaves that out.

    Args:
        by_rank: `readings` of each rank.
        hosts: of the ranks.
    """
    if len(by_rank) == 1:
        return [Line(CHECK, "ok", "one process")]
    skews = [median(own - first for own, first in zip(each, by_rank[0], strict=True)) for each in by_rank]
    middle = median(skews) if len(skews) > 2 else 0.0  # of two, the second is named
    off = {rank: skew - middle for rank, skew in enumerate(skews) if abs(skew - middle) > WIDE_S}
    found = [
        Line(
            CHECK,
            "warn",
            f"the clock of {named([rank], hosts)} is {abs(skew):,.1f} s {_SIDE[skew > 0]} the others",
            f"Start chronyd or ntpd on {hosts[rank]}.",
        )
        for rank, skew in off.items()
    ]
    widest = max(skews) - min(skews)
    return found or [Line(CHECK, "ok", f"all ranks within {max(widest, 0.001):.3f} s")]
