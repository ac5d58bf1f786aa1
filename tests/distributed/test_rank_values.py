"""Who has another value than rank 0."""

from __future__ import annotations

import pytest
import torch

from indictune.config.plan import Axes, Launch
from indictune.distributed import agreement, collectives
from indictune.distributed.agreement import RankDifference, differences_to_rank_0, rank_problems, short_values


def test_a_value_that_differs_or_is_missing_is_a_difference() -> None:
    found = differences_to_rank_0(
        1, "b", {"torch": "2.12", "trl": "1.16"}, {"torch": "2.13", "peft": "0.21", "trl": "1.16"}
    )
    assert found == [RankDifference(1, "b", "peft", "none", "0.21"), RankDifference(1, "b", "torch", "2.12", "2.13")]


def test_long_values_that_differ_at_their_end_stay_apart() -> None:
    one, other = short_values({"x": "a" * 1000 + "b"})["x"], short_values({"x": "a" * 1000 + "c"})["x"]
    assert one != other
    assert len(one) < 100
    assert short_values({"x": "short", "y": None}) == {"x": "short", "y": "None"}


def test_a_difference_is_named_once_a_host_with_its_ranks_and_both_values() -> None:
    of_second = [RankDifference(rank, "b", "version of torch", "2.12", "2.13") for rank in (3, 2)]
    (one, two) = rank_problems([*of_second, RankDifference(1, "a", "--seed", "2", "1")], host_of_0="a")
    assert (one.code, one.flag, one.value, one.details["expected"]) == ("ranks-differ", "--seed", "2", "1")
    assert one.details["ranks"] == "rank 1"
    assert (two.flag, two.value, two.details["expected"]) == ("version of torch", "2.12", "2.13")
    assert two.details["ranks"] == "ranks 2 to 3 on b"


def test_a_strategy_file_is_compared_by_what_it_says_and_not_by_its_place() -> None:
    said = {"FSDP_VERSION": "2", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "/a/zero.json", "HOME": "/root"}
    found = agreement.of_strategy(Launch("fsdp2", axes=Axes(tensor=2)), said)
    assert found.keys() & said.keys() == {"FSDP_VERSION"}
    assert (found["strategy"], found["FSDP_VERSION"], found["tensor size"]) == ("fsdp2", "2", "2")


def test_ranks_of_a_process_group_gather_what_they_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(
        collectives, "gather_from_all", lambda mine: [("a", {"rows": "5"}), mine, ("b", {"rows": "7"})]
    )
    monkeypatch.setattr(agreement, "gethostname", lambda: "a")
    (found,) = agreement.agree("here", lambda: {"rows": 5}, Launch("ddp", 3, 3), {}, 1.0)
    assert (found.code, found.flag, found.value, found.details["expected"]) == ("ranks-differ", "rows", "7", "5")
    assert found.details["ranks"] == "rank 2 on b"
