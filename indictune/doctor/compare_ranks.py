"""Compare the ranks: what came up, values, clocks, and how fast each rank computes and each pair sends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import distributed
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.collectives import barrier
from indictune.doctor.check_lines import Outcome, named_ranks
from indictune.doctor.collective_checks import wait_for_device

RANK, LINK = "slowest rank", "slowest link"
SLOW = 1.5  # times the usual time of a rank
SLOW_LINK = 3.0  # times slower than the usual link
ROUNDS = 15  # of pairs at most: each rank meets as many others

_SIDES = {"cpu": 384, "cuda": 4096}  # of the multiplied matrices
_TIMES, _MEASURED_S = 5, 0.5  # products at least, and the time they take at least
_SENT_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
_SENT_TIMES = 3

Pair = tuple[int, int]
_CLOCKS = "clocks"
_BARRIERS = 5
_SIDE = {True: "ahead of", False: "behind"}
WIDE_S = 1.0  # reports of several nodes are ordered by their clocks
_RANKS_ALIKE = "ranks alike"
_ABSENT = "none"
_GIVE_THE_SAME = "Give all nodes the same files, flags and packages."
LAUNCH_CHECK, _BACKEND_FLAG = "launch", "ddp_backend"


def compute_s(device: torch.device) -> float:
    """Seconds of a product of two matrices on a device: the shortest in half a second.

    Another program that runs in some of that time does not count; one that runs in all of it does.
    """
    side = _SIDES[device.type]
    left = torch.ones(side, side, device=device)
    found = list[float]()
    until = time.perf_counter() + _MEASURED_S
    while len(found) < _TIMES or time.perf_counter() < until:
        wait_for_device(device)
        began = time.perf_counter()
        left @ left
        wait_for_device(device)
        found.append(time.perf_counter() - began)
    return min(found)


def rounds_of_pairs(ranks: int) -> list[list[Pair]]:
    """Pairs of ranks that send at the same time, in rounds. Up to `ROUNDS` + 1 ranks, each pair comes once.

    The circle method of round-robin tournaments: rank 0 stays, and the others move on by one place a round.
    """
    even = ranks + ranks % 2
    found = []
    for turn in range(min(even - 1, ROUNDS)):
        circle = [0, *((place + turn) % (even - 1) + 1 for place in range(even - 1))]
        pairs = [(circle[place], circle[even - 1 - place]) for place in range(even // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < ranks])
    return found


def link_rates(device: torch.device) -> dict[int, float]:
    """Bytes a second in each direction between this rank and others, by the other. All ranks must call it."""
    rank, found = distributed.get_rank(), {}
    sent = torch.ones(_SENT_BYTES[device.type], dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    for pairs in rounds_of_pairs(distributed.get_world_size()):
        distributed.barrier()
        for pair in (each for each in pairs if rank in each):
            other = sum(pair) - rank
            times = [_exchange_s(sent, received, other) for _ in range(_SENT_TIMES + 1)]
            found[other] = len(sent) / min(times[1:])  # the first one connects them
    return found


def rank_lines(seconds: Sequence[float], hosts: Sequence[str]) -> list[Outcome]:
    """Which rank computes slowest, and whether that holds up the others.

    Args:
        seconds: `compute_s` of each rank.
        hosts: of the ranks.
    """
    usual = sorted(seconds)[(len(seconds) - 1) // 2]
    slow = [rank for rank, each in enumerate(seconds) if each > SLOW * usual]
    cure = "Look for other programs on it (nvidia-smi, top), its clock and temperature, and its power limit."
    found = [
        Outcome(
            RANK,
            "warn",
            f"{named_ranks([rank], hosts)} computes {seconds[rank] / usual:.1f} times as long as the others",
            cure,
        )
        for rank in slow
    ]
    last = max(range(len(seconds)), key=lambda rank: seconds[rank])
    ok = f"{named_ranks([last], hosts)}, by {seconds[last] / usual - 1:.0%}" if len(seconds) > 1 else "one process"
    return found or [Outcome(RANK, "ok", ok)]


def link_lines(by_rank: Sequence[Mapping[str, float]], hosts: Sequence[str]) -> list[Outcome]:
    """Which link is slowest, among those within nodes and those between nodes.

    Args:
        by_rank: `link_rates` of each rank; the other rank is a text, as JSON has it.
        hosts: of the ranks.
    """
    rates: dict[Pair, float] = {}
    for rank, links in enumerate(by_rank):
        for other, rate in links.items():
            pair = (min(rank, int(other)), max(rank, int(other)))
            rates[pair] = min(rates.get(pair, rate), rate)
    within = {pair: rate for pair, rate in rates.items() if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: rate for pair, rate in rates.items() if pair not in within}
    groups = [each for each in (within, between) if each]
    if found := [line for each in groups for line in _slow_links(each, hosts)]:
        return found
    slowest = [min(each.items(), key=lambda link: link[1]) for each in groups]
    shown = [f"{named_ranks(pair, hosts)}, {rate / 1e9:.2f} GB/s" for pair, rate in slowest]
    return [Outcome(LINK, "ok", "; ".join(shown) or "one process")]


def _slow_links(rates: Mapping[Pair, float], hosts: Sequence[str]) -> list[Outcome]:
    usual = sorted(rates.values())[len(rates) // 2]
    cure = (
        "Compare the cable, the port and the interface of these two (ibstat, ethtool; nvidia-smi topo -m in a node)."
    )
    return [
        Outcome(
            LINK,
            "warn",
            f"{named_ranks(pair, hosts)}: {rate / 1e9:.3f} GB/s, and {usual / 1e9:.3f} is usual here",
            cure,
        )
        for pair, rate in rates.items()
        if SLOW_LINK * rate < usual
    ]


def _exchange_s(sent: torch.Tensor, received: torch.Tensor, other: int) -> float:
    """Seconds in which this rank and another one send each other a message."""
    wait_for_device(sent.device)
    began = time.perf_counter()
    requests = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, sent, other),
            distributed.P2POp(distributed.irecv, received, other),
        ]
    )
    for each in requests:
        each.wait()
    wait_for_device(sent.device)
    return time.perf_counter() - began


def clock_readings() -> list[float]:
    """The clock of this rank after each of some barriers, in seconds since 1970. All ranks must call it."""
    found = []
    for _ in range(_BARRIERS):
        barrier()
        found.append(time.time())
    return found


def clock_lines(by_rank: Sequence[Sequence[float]], hosts: Sequence[str]) -> list[Outcome]:
    """Which ranks' clocks are off.

    A rank leaves a barrier late, if it is busy, and never early. The median of the rounds leaves that out.

    Args:
        by_rank: `clock_readings` of each rank.
        hosts: of the ranks.
    """
    if len(by_rank) == 1:
        return [Outcome(_CLOCKS, "ok", "one process")]
    skews = [median(own - first for own, first in zip(each, by_rank[0], strict=True)) for each in by_rank]
    middle = median(skews) if len(skews) > 2 else 0.0  # of two, the second is named
    off = {rank: skew - middle for rank, skew in enumerate(skews) if abs(skew - middle) > WIDE_S}
    found = [
        Outcome(
            _CLOCKS,
            "warn",
            f"the clock of {named_ranks([rank], hosts)} is {abs(skew):,.1f} s {_SIDE[skew > 0]} the others",
            f"Start chronyd or ntpd on {hosts[rank]}.",
        )
        for rank, skew in off.items()
    ]
    widest = max(skews) - min(skews)
    return found or [Outcome(_CLOCKS, "ok", f"all ranks within {max(widest, 0.001):.3f} s")]


def alike_lines(by_rank: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[Outcome]:
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
            text = f"{name} of {named_ranks(ranks, hosts)}: {value}; the others have {usual}"
            found.append(Outcome(_RANKS_ALIKE, "fail", text, _GIVE_THE_SAME))
    alone = len(by_rank) == 1
    ok = f"{len(by_rank[0])} values: flags, seeds, rows, packages and strategy file"
    return found or [Outcome(_RANKS_ALIKE, "ok", "one process" if alone else ok)]


def launch_line(launch: Launch, args: TrainingArguments) -> Outcome:
    """The strategy, its axes, processes and backend. `launch_check` has compared strategy and processes."""
    nodes = max(1, launch.world_size // launch.local_world_size)
    sizes = {"pipeline": launch.axes.pipeline, "tensor": launch.axes.tensor, "context": launch.axes.context}
    sizes |= {"data": launch.data_size, "replicas": launch.axes.replicas}
    axes = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    asked = f"{launch.strategy}, {launch.world_size} process(es) on {nodes} node(s)" + (f", {axes}" if axes else "")
    if not distributed.is_initialized():
        return Outcome(LAUNCH_CHECK, "ok", f"{asked}, on {args.device}")
    rank, backend = distributed.get_rank(), distributed.get_backend()
    expected = "nccl" if args.device.type == "cuda" else "gloo"
    if rank != launch.rank:
        cure = "Start all processes with one launcher command."
        return Outcome(LAUNCH_CHECK, "fail", f"{asked}; rank {launch.rank} came up as {rank}", cure)
    if expected not in backend:
        cure = f"Leave out --{_BACKEND_FLAG}: {expected} is the backend of {args.device.type}."
        return Outcome(LAUNCH_CHECK, "warn", f"{asked}, on {args.device} over {backend}", cure)
    return Outcome(LAUNCH_CHECK, "ok", f"{asked}, over {backend}")
