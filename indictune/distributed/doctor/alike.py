"""What all ranks must have alike: which rank has another recipe, seed, package or file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from indictune.distributed.doctor.lines import Line, named

CHECK = "ranks alike"
_ABSENT = "none"
_CURE = "Give all nodes the same files, flags and packages."


def alike_lines(by_rank: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[Line]:
    """A line for each value of ranks that differs from that of most, or, of two ranks, from that of rank 0.

    Args:
        by_rank: the values of each rank, as `rank_values.shown` gives them.
        hosts: of the ranks.
    """
    found = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        values = [each.get(name, _ABSENT) for each in by_rank]
        usual = Counter(values).most_common(1)[0][0]  # of equally many, the first
        for value in dict.fromkeys(each for each in values if each != usual):
            ranks = [rank for rank, each in enumerate(values) if each == value]
            text = f"{name} of {named(ranks, hosts)}: {value}; the others have {usual}"
            found.append(Line(CHECK, "fail", text, _CURE))
    alone = len(by_rank) == 1
    ok = f"{len(by_rank[0])} values: flags, seeds, rows, packages and strategy file"
    return found or [Line(CHECK, "ok", "one process" if alone else ok)]
