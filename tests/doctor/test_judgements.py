"""What doctor makes of what the ranks measured: literal measurements, and closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from indictune.doctor.check_lines import Outcome, exit_code, merged, named_ranks
from indictune.doctor.machine import gpu_lines
from indictune.doctor.rank_checks import (
    COLLECTIVES,
    bandwidth_line,
    clock_lines,
    difference_lines,
    gpu_link,
    link_lines,
    rank_lines,
    rounds_of_pairs,
    wrong_lines,
)
from indictune.doctor.roll_call import outside_torch

ONE, TWO = ["a", "a", "a", "a"], ["a", "a", "b", "b"]  # hosts of 4 ranks


def said(lines: Sequence[Outcome]) -> list[tuple[str, str]]:
    return [(line.status, line.found) for line in lines]


def test_a_line_has_its_ranks_unless_all_ranks_have_it() -> None:
    ok, bad = Outcome("disk", "ok", "9 GB"), Outcome("disk", "fail", "full", "Remove files.")
    assert merged([[ok], [Outcome("disk", "ok", "8 GB")]], ["a", "a"]) == [ok]
    assert merged([[bad], [bad]], ["a", "b"]) == [bad]
    assert said(merged([[ok], [bad], [bad], [ok]], TWO)) == [("fail", "ranks 1, 2 on a, b: full")]
    assert [exit_code([line]) for line in (ok, bad, Outcome("x", "warn", ""))] == [0, 1, 0]
    assert bad.text().splitlines() == ["fail  disk            full", f"{' ' * 22}Remove files."]
    assert named_ranks([2], ONE) == "rank 2"


def test_the_rank_that_differs_from_most_is_named_even_if_it_is_rank_0() -> None:
    found = difference_lines([{"--seed": "7"}, {"--seed": "42"}, {"--seed": "42"}], ["a", "a", "a"])
    assert said(found) == [("fail", "--seed of rank 0: 7; the others have 42")]
    found = difference_lines([{"x": "1", "y": "1"}, {"x": "1"}], ["a", "b"])
    assert said(found) == [("fail", "y of rank 1 on b: none; the others have 1")]
    assert difference_lines([{"x": "1"}, {"x": "1"}], ["a", "a"])[0].status == "ok"


def test_a_clock_is_named_when_it_is_off_by_more_than_a_second() -> None:
    ahead = [[100.0, 101.0, 102.0], [105.2, 106.2, 107.2], [100.2, 101.2, 109.0]]
    behind = [[9.0], [0.0]]
    assert said(clock_lines(ahead, ["a", "b", "c"])) == [
        ("warn", "the clock of rank 1 on b is 5.0 s ahead of the others")
    ]
    assert said(clock_lines(behind, ["a", "a"])) == [("warn", "the clock of rank 1 is 9.0 s behind the others")]
    assert said(clock_lines([[1.0, 2.0], [1.25, 2.25]], ["a", "a"])) == [("ok", "all ranks within 0.250 s")]


def test_the_slowest_rank_is_named() -> None:
    text = "computes 3.0 times as long as the others"
    assert said(rank_lines([1.0, 1.0, 3.0], ["a"] * 3)) == [("warn", f"rank 2 {text}")]
    assert said(rank_lines([3.0, 1.0], ["a", "a"])) == [("warn", f"rank 0 {text}")]
    assert said(rank_lines([1.0, 1.2], ["a", "b"])) == [("ok", "rank 1 on b, by 20%")]


def rates(*each: tuple[int, int, float]) -> list[dict[str, float]]:
    """Rates of the links as each rank measured them."""
    ranks = 1 + max(other for _, other, _ in each)
    return [
        {str(one + other - rank): rate for one, other, rate in each if rank in (one, other)} for rank in range(ranks)
    ]


def test_the_slowest_link_is_named_among_those_of_its_kind() -> None:
    within = [(0, 1, 80e9), (2, 3, 80e9)]
    between = [(0, 2, 10e9), (0, 3, 10e9), (1, 2, 10e9), (1, 3, 10e9)]
    assert said(link_lines(rates(*within, *between), TWO)) == [
        ("ok", "ranks 0, 1 on a, 80.00 GB/s; ranks 0, 2 on a, b, 10.00 GB/s")
    ]
    between[3] = (1, 3, 2e9)
    assert said(link_lines(rates(*within, *between), TWO)) == [
        ("warn", "ranks 1, 3 on a, b: 2.000 GB/s, and 10.000 is usual here")
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_each_pair_of_ranks_sends_once_and_no_rank_twice_at_a_time(ranks: int) -> None:
    rounds = rounds_of_pairs(ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(combinations(range(ranks), 2))
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))


def test_many_ranks_meet_fifteen_others() -> None:
    rounds = rounds_of_pairs(64)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(rounds) == 15
    assert len(set(met)) == 15 * 32


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md: 2(n-1)/n of the bytes for an all-reduce, (n-1)/n for the others."""
    found = {each.name: each.share(4) * 8e9 / 2.0 for each in COLLECTIVES}
    assert found == {"all-reduce": 6e9, "all-gather": 3e9, "reduce-scatter": 3e9}


def test_the_rank_with_a_wrong_result_is_named() -> None:
    right = {"all-reduce": [True, True], "all-gather": [True, False]}
    found = wrong_lines(right, ["a", "a"])
    assert [(line.check, line.found) for line in found] == [("all-gather", "rank 1 got a wrong result")]


@pytest.mark.parametrize(
    ("name", "link", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "nvlink4", 450e9),
        ("NVIDIA A100-SXM4-40GB", "nvlink3", 300e9),
        ("NVIDIA A100 80GB PCIe", "pcie4", 32e9),
        ("NVIDIA GeForce RTX 4090", "pcie4", 32e9),
        ("NVIDIA L40S", "pcie4", 32e9),
        ("Tesla T4", "pcie3", 16e9),
        ("Another", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_the_link_of_a_gpu_is_known_by_its_name(name: str, link: str, rate: float) -> None:
    assert gpu_link(name) == (link, rate)


def link(gpu: str = "", network: float = 0.0) -> dict[str, Any]:
    name, rate = gpu_link(gpu)
    return {"gpu_link": name, "gpu_link_bytes_s": rate, "network_bytes_s": network}


@pytest.mark.parametrize(
    ("links", "hosts", "rate", "status", "end"),
    [
        ([link("H100")] * 2, ["a", "a"], 360e9, "ok", "80% of nvlink4 (450 GB/s)"),
        ([link("H100")] * 2, ["a", "a"], 20e9, "warn", "4% of nvlink4 (450 GB/s)"),
        ([link("H100", 50e9)] * 2, ["a", "b"], 40e9, "ok", "80% of the network (50 GB/s)"),
        ([link("T4", 50e9)] * 2, ["a", "b"], 8e9, "ok", "50% of pcie3 (16 GB/s)"),
        ([link()] * 2, ["a", "a"], 1e9, "ok", "in the memory of one node"),
        ([link(), link("", 1.25e9)], ["a", "b"], 1e9, "ok", "between the nodes, whose speed is unknown"),
    ],
)
def test_a_collective_is_compared_with_the_slowest_link(
    links: Sequence[Mapping[str, Any]], hosts: Sequence[str], rate: float, status: str, end: str
) -> None:
    line = bandwidth_line("all-reduce", rate, links, hosts)
    assert line.status == status
    assert line.found.endswith(end)


def gpu(visible: int, uuid: str = "", name: str = "H100", driver: bool = False, cuda: str = "13.0") -> dict[str, Any]:
    return {"visible": visible, "name": name if visible else "", "uuid": uuid, "driver": driver, "cuda": cuda}


@pytest.mark.parametrize(
    ("ranks", "status", "found"),
    [
        ([gpu(2, "x"), gpu(2, "y")], "ok", "2 process(es) on 1 node(s): 2 x H100"),
        ([gpu(1, "x"), gpu(1)], "fail", "2 processes on a, and 1 visible GPU(s)"),
        ([gpu(8, "x"), gpu(8, "y")], "warn", "8 visible GPUs on a, and 2 process(es): 6 stay unused"),
        ([gpu(2, "x"), gpu(2, "x")], "fail", "ranks 0, 1 have the same GPU"),
        ([gpu(2, "x"), gpu(2, "y", "L4")], "warn", "rank 1: L4; the others have H100"),
        ([gpu(0, driver=True)], "fail", "rank 0: there is an NVIDIA GPU, and torch sees none"),
        ([gpu(0, driver=True, cuda="")], "fail", "rank 0: this torch is built for the CPU"),
    ],
)
def test_gpus_are_compared_with_processes(ranks: list[dict[str, Any]], status: str, found: str) -> None:
    assert (status, found) in said(gpu_lines(ranks, ["a"] * len(ranks)))


def test_a_rank_outside_torch_is_not_in_the_collective_that_others_wait_in() -> None:
    import torch

    inside, outside = [f"{torch.__file__[:-12]}/distributed/x.py:1 in wait: work"], ["/my/rows.py:2 in read: file"]
    assert outside_torch({0: inside, 1: outside, 2: inside}) == [1]
    assert outside_torch({0: outside, 1: outside}) == []
    assert outside_torch({0: inside, 1: inside}) == []
