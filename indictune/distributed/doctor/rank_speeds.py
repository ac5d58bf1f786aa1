"""How fast each rank computes, and how fast each pair of ranks sends: the slowest rank and link by name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import distributed

from indictune.distributed.doctor.collective_sums import wait_for_device
from indictune.distributed.doctor.lines import Line, named

RANK, LINK = "slowest rank", "slowest link"
SLOW = 1.5  # times the usual time of a rank
SLOW_LINK = 3.0  # times slower than the usual link
ROUNDS = 15  # of pairs at most: each rank meets as many others

_SIDES = {"cpu": 384, "cuda": 4096}  # of the multiplied matrices
_TIMES, _MEASURED_S = 5, 0.5  # products at least, and the time they take at least
_SENT_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
_SENT_TIMES = 3

Pair = tuple[int, int]


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


def rank_lines(seconds: Sequence[float], hosts: Sequence[str]) -> list[Line]:
    """Which rank computes slowest, and whether that holds up the others.

    Args:
        seconds: `compute_s` of each rank.
        hosts: of the ranks.
    """
    usual = sorted(seconds)[(len(seconds) - 1) // 2]
    slow = [rank for rank, each in enumerate(seconds) if each > SLOW * usual]
    cure = "Look for other programs on it (nvidia-smi, top), its clock and temperature, and its power limit."
    found = [
        Line(
            RANK,
            "warn",
            f"{named([rank], hosts)} computes {seconds[rank] / usual:.1f} times as long as the others",
            cure,
        )
        for rank in slow
    ]
    last = max(range(len(seconds)), key=lambda rank: seconds[rank])
    ok = f"{named([last], hosts)}, by {seconds[last] / usual - 1:.0%}" if len(seconds) > 1 else "one process"
    return found or [Line(RANK, "ok", ok)]


def link_lines(by_rank: Sequence[Mapping[str, float]], hosts: Sequence[str]) -> list[Line]:
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
    shown = [f"{named(pair, hosts)}, {rate / 1e9:.2f} GB/s" for pair, rate in slowest]
    return [Line(LINK, "ok", "; ".join(shown) or "one process")]


def _slow_links(rates: Mapping[Pair, float], hosts: Sequence[str]) -> list[Line]:
    usual = sorted(rates.values())[len(rates) // 2]
    cure = (
        "Compare the cable, the port and the interface of these two (ibstat, ethtool; nvidia-smi topo -m in a node)."
    )
    return [
        Line(LINK, "warn", f"{named(pair, hosts)}: {rate / 1e9:.3f} GB/s, and {usual / 1e9:.3f} is usual here", cure)
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
