"""What a process spends its steps on, by a trace of torch.profiler: compute, communication, and neither."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Interval = tuple[float, float]  # begin and end, in any unit


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The times that are in at least one span, as sorted spans that do not touch."""
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif begin < end:
            merged.append((begin, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The times that are in both. Each comes from `union`."""
    common, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            common.append((begin, end))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return common


def total_length(spans: Iterable[Interval]) -> float:
    """The time in spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


# Phases of a step, in order. The callback that profiles names the ranges of the trace so.
READING, LEARNING, UPDATING = PHASES = ("reading rows", "forward and backward", "optimizer step")

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Namespaces of what starts a communication or only calls operators: both may wait for other ranks.
_NO_COMPUTE = ("c10d", "_c10d_functional", "c10d_functional", "autograd", "torch")
_MICROSECONDS = 1e6

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a mean step of one rank. compute + exposed communication + gaps = step."""

    rank: int
    steps: int  # that were measured
    step_s: float  # from the end of the step before to its own end, without evaluations and saves between
    compute_s: float  # an operator ran, or on a GPU a kernel or a copy
    communication_s: float  # a collective or a message was under way, waits for slower ranks included
    overlapped_s: float  # of the communication, while something was computed
    # Neither, by phase of the step: on a GPU the device is idle, because the host has not prepared work.
    gaps_s: dict[str, float]

    @property
    def exposed_s(self) -> float:
        """Communication without compute."""
        return self.communication_s - self.overlapped_s

    @property
    def own_s(self) -> float:
        """The time that this rank takes by itself: all but exposed communication, in which it may wait for others."""
        return self.step_s - self.exposed_s

    def parts(self) -> dict[str, float]:
        """`own_s` by what it is spent on."""
        return {"compute": self.compute_s} | {f"gaps in {phase}": gaps for phase, gaps in self.gaps_s.items()}


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for: the one with the largest `own_s`."""

    rank: int
    own_s: float
    others_s: float  # the mean of the others
    more_s: dict[str, float]  # what it spends more time on than the others' mean, by part, the largest first


def rank_times(rank: int, events: Iterable[Event]) -> RankTimes | None:
    """The times of a rank, by the `traceEvents` of its trace; None if no step is whole."""
    complete = [event for event in events if event.get("ph") == "X"]
    steps = list(_steps(complete))
    if not steps:
        return None
    on_device = [event for event in complete if event.get("cat") in _ON_DEVICE]
    compute, communication = _of_device(complete, on_device) if on_device else _of_cpu(complete)
    windows = union((step[0], step[-1]) for step in steps)
    compute, communication = intersection(compute, windows), intersection(communication, windows)
    busy = union([*compute, *communication])

    def mean(spans: Iterable[Interval]) -> float:
        return total_length(spans) / _MICROSECONDS / len(steps)

    phases = {phase: union((step[each], step[each + 1]) for step in steps) for each, phase in enumerate(PHASES)}
    gaps = {phase: mean(spans) - mean(intersection(busy, spans)) for phase, spans in phases.items()}
    overlapped = mean(intersection(compute, communication))
    return RankTimes(rank, len(steps), mean(windows), mean(compute), mean(communication), overlapped, gaps)


def slowest_rank(times: Sequence[RankTimes]) -> Slowest | None:
    """The rank that holds up the others; None if there are no others."""
    if len(times) < 2:
        return None
    worst = max(times, key=lambda each: each.own_s)
    others = [each for each in times if each is not worst]
    usual = {name: sum(each.parts()[name] for each in others) / len(others) for name in worst.parts()}
    more = {name: spent - usual[name] for name, spent in worst.parts().items() if spent > usual[name]}
    largest_first = dict(sorted(more.items(), key=lambda item: -item[1]))
    return Slowest(worst.rank, worst.own_s, sum(usual.values()), largest_first)


def _steps(complete: Iterable[Event]) -> Iterator[tuple[float, float, float, float]]:
    """The begin of each phase of a whole step, and its end.

    An evaluation or a save begins the phase of reading anew: the range before it is not followed by the next phase.
    """
    named = (event for event in complete if event.get("cat") == "user_annotation" and event["name"] in PHASES)
    ranges = sorted(named, key=lambda event: float(event["ts"]))
    for reading, (learning, updating) in zip(ranges, pairwise(ranges[1:]), strict=False):
        if (reading["name"], learning["name"], updating["name"]) == PHASES:
            yield _span(reading)[0], _span(learning)[0], *_span(updating)


def _span(event: Event) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _of_device(complete: Sequence[Event], on_device: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """Kernels and copies on all streams; kernels of NCCL, and messages of gloo."""
    of_nccl = [event for event in on_device if str(event["name"]).startswith("nccl")]
    others = [event for event in on_device if not str(event["name"]).startswith("nccl")]
    _, messages = _of_cpu([event for event in complete if not str(event["name"]).startswith("c10d::")])
    return union(map(_span, others)), union([*map(_span, of_nccl), *messages])


def _of_cpu(complete: Sequence[Event]) -> tuple[list[Interval], list[Interval]]:
    """Operators such as `aten::mm`, on all threads but those of gloo; messages of gloo, and the calls that begin them.

    An operator's name has a namespace. A function of autograd may wait for messages, and is none.
    """
    messages = [event for event in complete if str(event["name"]).startswith("gloo:")]
    own = {event.get("tid") for event in complete if event["name"] in PHASES}
    of_gloo = {event.get("tid") for event in messages} - own
    named = [(str(event["name"]).partition("::"), event) for event in complete if event.get("cat") == "cpu_op"]
    operators = union(
        _span(event)
        for (space, colons, _), event in named
        if colons and space not in _NO_COMPUTE and event.get("tid") not in of_gloo
    )
    calls = [_span(event) for (space, _, _), event in named if space == "c10d"]
    collectives = [_span(event) for event in messages if event.get("tid") not in own]
    waits = (_wait(_span(event), operators) for event in messages if event.get("tid") in own)
    return operators, union([*calls, *collectives, *waits])


def _wait(message: Interval, operators: Sequence[Interval]) -> Interval:
    """The time in which a thread waited for a message to another rank or from it, which lasts until the wait is over.

    It begins with the message, or when the last operator before its end is over.
    """
    begin, end = message
    before = bisect_left(operators, (end, end)) - 1
    return max(begin, operators[before][1]) if before >= 0 else begin, end
