"""What ranks show together: right collectives, equal values, clocks, and the speed of each rank and link."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed

from indictune.distributed.agreement import ABSENT
from indictune.distributed.collectives import barrier
from indictune.doctor.check_lines import Outcome, named_ranks
from indictune.planning.hardware import gpu_of_device, known_gpus, known_links

Tensor = torch.Tensor

_PERIOD = 7  # of the numbers: small ones, whose sums over thousands of ranks are exact in float32
LOW = 0.4  # of the link's speed, with GPUs: a judgement. NCCL reaches 0.8 (nccl-tests, doc/PERFORMANCE.md)
_PORTS = Path("/sys/class/infiniband")
_SLOTS = ("pcie", "nvl")  # in the names of GPUs without NVLink to all others


class Collective(NamedTuple):
    """A collective on known numbers: the rank, the number of ranks and the numbers of one rank give the result."""

    name: str
    share: Callable[[int], float]  # bytes that each link carries, for each byte of the whole tensor, by ranks
    run: Callable[[int, int, Tensor], Tensor]
    expected: Callable[[int, int, Tensor], Tensor]


def _all_reduce(rank: int, _: int, base: Tensor) -> Tensor:
    tensor = (rank + 1) * base
    distributed.all_reduce(tensor)
    return tensor


def _all_gather(rank: int, ranks: int, base: Tensor) -> Tensor:
    part = base[: len(base) // ranks] + rank
    whole = base.new_empty(len(part) * ranks)
    distributed.all_gather_single(whole, part)
    return whole


def _gathered(_: int, ranks: int, base: Tensor) -> Tensor:
    part = base[: len(base) // ranks]
    return torch.cat([part + other for other in range(ranks)])


def _reduce_scatter(rank: int, ranks: int, base: Tensor) -> Tensor:
    part = base.new_empty(len(base) // ranks)
    distributed.reduce_scatter_single(part, (rank + 1) * base[: len(part) * ranks])
    return part


def _scattered(rank: int, ranks: int, base: Tensor) -> Tensor:
    size = len(base) // ranks
    return _sum_of_ranks(ranks) * base[rank * size : (rank + 1) * size]


def _sum_of_ranks(ranks: int) -> int:
    return ranks * (ranks + 1) // 2


# The bytes on a link are those of nccl-tests (doc/PERFORMANCE.md, "bus bandwidth").
COLLECTIVES = (
    Collective("all-reduce", lambda n: 2 * (n - 1) / n, _all_reduce, lambda _, n, base: _sum_of_ranks(n) * base),
    Collective("all-gather", lambda n: (n - 1) / n, _all_gather, _gathered),
    Collective("reduce-scatter", lambda n: (n - 1) / n, _reduce_scatter, _scattered),
)


def known_numbers(count: int, device: torch.device) -> Tensor:
    """`count` small whole numbers as float32, on a device: [count]."""
    return (torch.arange(count, device=device) % _PERIOD).float()


def is_right(each: Collective, base: Tensor) -> bool:
    """Whether this rank gets the known result. All ranks must call it."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return torch.equal(each.run(rank, ranks, base), each.expected(rank, ranks, base))


def seconds(each: Collective, base: Tensor, times: int) -> float:
    """Seconds of a collective on this rank, the mean of some times. All ranks must call it."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    wait_for_device(base.device)
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(times):
        each.run(rank, ranks, base)
    wait_for_device(base.device)
    return (time.perf_counter() - began) / times


def wrong_lines(right: Mapping[str, Sequence[bool]], hosts: Sequence[str]) -> list[Outcome]:
    """A line for each collective that gave a rank another result. `right` says so by collective and rank."""
    cure = "Gradients would be wrong here. Leave out that rank's GPU or node, or try NCCL_P2P_DISABLE=1."
    wrong = {name: [rank for rank, each in enumerate(by_rank) if not each] for name, by_rank in right.items()}
    return [
        Outcome(name, "fail", f"{named_ranks(ranks, hosts)} got a wrong result", cure)
        for name, ranks in wrong.items()
        if ranks
    ]


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link_facts(gpu: str, interface: str) -> dict[str, float | str]:
    """What the links of this rank should carry, in bytes a second in one direction; 0 for unknown.

    GPU and network interface are empty without one.
    """
    name, rate = gpu_link(gpu)
    return {"gpu_link": name, "gpu_link_bytes_s": rate, "network_bytes_s": _network(interface)}


def gpu_link(gpu: str) -> tuple[str, float]:
    """The link between the GPUs of a node and its bytes a second; no name and 0 for an unknown GPU."""
    name = gpu_of_device(gpu)
    if name is None:
        return "", 0.0
    link = "pcie4" if any(word in gpu.lower() for word in _SLOTS) else str(known_gpus()[name]["link"])
    return link, known_links()[link]


def bandwidth_line(name: str, bus_bytes_s: float, links: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Outcome:
    """How a collective's bus bandwidth compares with the slowest link that it crosses, by all `link_facts`."""
    several, has_gpus = len(set(hosts)) > 1, all(each["gpu_link_bytes_s"] for each in links)
    speeds = {str(links[0]["gpu_link"]): min(float(each["gpu_link_bytes_s"]) for each in links)} if has_gpus else {}
    if several:
        speeds["the network"] = min(float(each["network_bytes_s"]) for each in links)
    known = {link: speed for link, speed in speeds.items() if speed}
    found = f"right; bus bandwidth {bus_bytes_s / 1e9:.2f} GB/s"
    if not known:
        where = "between the nodes, whose speed is unknown" if several else "in the memory of one node"
        return Outcome(name, "ok", f"{found} {where}")
    link = min(known, key=known.__getitem__)
    found = f"{found}, {bus_bytes_s / known[link]:.0%} of {link} ({known[link] / 1e9:.0f} GB/s)"
    if not has_gpus or bus_bytes_s >= LOW * known[link]:
        return Outcome(name, "ok", found)
    cure = "NCCL_DEBUG=INFO names the transport that NCCL chose, nvidia-smi topo -m the links, ibstat the ports."
    return Outcome(name, "warn", found, cure)


def _network(interface: str) -> float:
    """Bytes a second of this node's InfiniBand ports, or else of its network interface; 0 for unknown."""
    gigabits = 0.0
    for rate in _PORTS.glob("*/ports/*/rate"):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (rate.parent / "state").read_text(encoding="ascii"):
                gigabits += float(rate.read_text(encoding="ascii").split()[0])  # "400 Gb/sec (4X NDR)"
    up = {name: each.speed for name, each in psutil.net_if_stats().items() if each.isup and name != "lo"}
    megabits = up.get(interface, 0) if interface else max(up.values(), default=0)
    return 1e9 / 8 * gigabits or 1e6 / 8 * megabits


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
WIDE_S = 1.0  # reports of several nodes are ordered by their clocks
_RANKS_ALIKE = "ranks alike"
_GIVE_THE_SAME = "Give all nodes the same files, flags and packages."


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
    """Which rank computes slowest, by `compute_s` of each, and whether that holds up the others."""
    usual = sorted(seconds)[(len(seconds) - 1) // 2]
    cure = "Look for other programs on it (nvidia-smi, top), its clock and temperature, and its power limit."
    found = []
    for rank, each in enumerate(seconds):
        if each > SLOW * usual:
            text = f"{named_ranks([rank], hosts)} computes {each / usual:.1f} times as long as the others"
            found.append(Outcome(RANK, "warn", text, cure))
    last = max(range(len(seconds)), key=lambda rank: seconds[rank])
    ok = f"{named_ranks([last], hosts)}, by {seconds[last] / usual - 1:.0%}" if len(seconds) > 1 else "one process"
    return found or [Outcome(RANK, "ok", ok)]


def link_lines(by_rank: Sequence[Mapping[str, float]], hosts: Sequence[str]) -> list[Outcome]:
    """Which link is slowest, among those within nodes and those between nodes.

    `by_rank` has the `link_rates` of each rank; the other rank is a text, as JSON has it.
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
    look = "ibstat, ethtool; nvidia-smi topo -m in a node"
    cure = f"Compare the cable, the port and the interface of these two ({look})."
    slow = {pair: rate for pair, rate in rates.items() if SLOW_LINK * rate < usual}
    speeds = {pair: f"{rate / 1e9:.3f} GB/s, and {usual / 1e9:.3f} is usual here" for pair, rate in slow.items()}
    return [Outcome(LINK, "warn", f"{named_ranks(pair, hosts)}: {text}", cure) for pair, text in speeds.items()]


def _exchange_s(sent: torch.Tensor, received: torch.Tensor, other: int) -> float:
    wait_for_device(sent.device)
    began = time.perf_counter()
    sending = distributed.P2POp(distributed.isend, sent, other)
    for each in distributed.batch_isend_irecv([sending, distributed.P2POp(distributed.irecv, received, other)]):
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
    """Which ranks' clocks are off, by `clock_readings` of each.

    A rank leaves a barrier late, if it is busy, and never early. The median of the rounds leaves that out.
    """
    if len(by_rank) == 1:
        return [Outcome(_CLOCKS, "ok", "one process")]
    skews = [median(own - first for own, first in zip(each, by_rank[0], strict=True)) for each in by_rank]
    middle = median(skews) if len(skews) > 2 else 0.0  # of two, the second is named
    off = {rank: skew - middle for rank, skew in enumerate(skews) if abs(skew - middle) > WIDE_S}
    found = []
    for rank, skew in off.items():
        side = "ahead of" if skew > 0 else "behind"
        text = f"the clock of {named_ranks([rank], hosts)} is {abs(skew):,.1f} s {side} the others"
        found.append(Outcome(_CLOCKS, "warn", text, f"Start chronyd or ntpd on {hosts[rank]}."))
    widest = max(skews) - min(skews)
    return found or [Outcome(_CLOCKS, "ok", f"all ranks within {max(widest, 0.001):.3f} s")]


def difference_lines(by_rank: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[Outcome]:
    """A line for each of the `short_values` of ranks that is not that of most, or, of two ranks, that of rank 0."""
    found = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        values = [each.get(name, ABSENT) for each in by_rank]
        usual = Counter(values).most_common(1)[0][0]  # of equally many, the first
        for value in dict.fromkeys(each for each in values if each != usual):
            ranks = [rank for rank, each in enumerate(values) if each == value]
            text = f"{name} of {named_ranks(ranks, hosts)}: {value}; the others have {usual}"
            found.append(Outcome(_RANKS_ALIKE, "fail", text, _GIVE_THE_SAME))
    ok = f"{len(by_rank[0])} values: flags, seeds, rows, packages and strategy file"
    return found or [Outcome(_RANKS_ALIKE, "ok", "one process" if len(by_rank) == 1 else ok)]
