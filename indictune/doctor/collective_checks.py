"""Collectives on numbers whose result is known, and their speed next to that of the links."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed

from indictune.doctor.check_lines import Outcome, named_ranks
from indictune.planning.hardware import gpu_of_device, known_gpus, known_links

Tensor = torch.Tensor

_PERIOD = 7  # of the numbers: small ones, whose sums over thousands of ranks are exact in float32
LOW = 0.4  # of the link's speed, with GPUs: a judgement. NCCL reaches 0.8 (nccl-tests, doc/PERFORMANCE.md)
_PORTS = Path("/sys/class/infiniband")
_SLOTS = ("pcie", "nvl")  # in the names of GPUs without NVLink to all others


@dataclass(frozen=True)
class Collective:
    """A collective on known numbers.

    Attributes:
        name: of it.
        share: bytes that each link carries, for each byte of the whole tensor and N ranks.
        run: does it: the number of the rank, the ranks and the numbers of one rank -> result.
        expected: its result.
    """

    name: str
    share: Callable[[int], float]
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
    """Seconds of one collective on this rank. All ranks must call it.

    Args:
        each: the collective.
        base: numbers of one rank.
        times: it is repeated.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    wait_for_device(base.device)
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(times):
        each.run(rank, ranks, base)
    wait_for_device(base.device)
    return (time.perf_counter() - began) / times


def bus_bandwidth(each: Collective, size_bytes: float, ranks: int, slowest_s: float) -> float:
    """Bytes a second on the links, comparable with their speed for any number of ranks.

    Args:
        each: the collective.
        size_bytes: of the whole tensor: what is summed, or gathered, or scattered.
        ranks: that take part.
        slowest_s: seconds of the slowest rank.
    """
    return each.share(ranks) * size_bytes / slowest_s


def wrong_lines(right: Mapping[str, Sequence[bool]], hosts: Sequence[str]) -> list[Outcome]:
    """A line for each collective that gave a rank another result.

    Args:
        right: collective -> whether each rank got the known result.
        hosts: of the ranks.
    """
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

    Args:
        gpu: its name, as the driver gives it; empty without one.
        interface: the network interface that the user chose; empty for none.
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
    """How a collective's bus bandwidth compares with the slowest link that it crosses.

    Args:
        name: of the collective.
        bus_bytes_s: its bus bandwidth.
        links: `link_facts` of each rank.
        hosts: of the ranks.
    """
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
