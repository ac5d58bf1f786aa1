"""All-reduce, all-gather and reduce-scatter on numbers whose result is known, and how fast they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from indictune.distributed.doctor.lines import Line, named

Tensor = torch.Tensor

_PERIOD = 7  # of the numbers: small ones, whose sums over thousands of ranks are exact in float32


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


def numbers(count: int, device: torch.device) -> Tensor:
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


def wrong_lines(right: Mapping[str, Sequence[bool]], hosts: Sequence[str]) -> list[Line]:
    """A line for each collective that gave a rank another result.

    Args:
        right: collective -> whether each rank got the known result.
        hosts: of the ranks.
    """
    cure = "Gradients would be wrong here. Leave out that rank's GPU or node, or try NCCL_P2P_DISABLE=1."
    wrong = {name: [rank for rank, each in enumerate(by_rank) if not each] for name, by_rank in right.items()}
    return [
        Line(name, "fail", f"{named(ranks, hosts)} got a wrong result", cure) for name, ranks in wrong.items() if ranks
    ]


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
