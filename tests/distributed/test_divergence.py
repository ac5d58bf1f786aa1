"""Copies that differ between ranks are found, and the rank and the tensor are named."""

from __future__ import annotations

import json

import pytest
import torch

from indictune.config.plan import Axes, Launch
from indictune.distributed.agreement import Fault, copies_of, faults_in
from tests.distributed import diverging
from tests.ranks.launching import start, torchrun

NAMED = {
    "of_weight": "weight 1.weight",
    "of_state": "exp_avg of 0.bias",
    "of_seed": "seed of the random generator",
    "tp of_weight": "weight 1.weight",
    "tp of_generator": "random generator",
    "tp of_copied_mesh": "weight 1.bias",
}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_planted_fault_is_named(ranks: int) -> None:
    result = start([*torchrun(ranks), diverging.__file__])
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for fault, tensor in NAMED.items():
        assert found[fault] is not None, fault
        assert f"rank {ranks - 1} on" in found[fault]
        assert f"has another {tensor} than rank 0" in found[fault]
        assert "After step 5" in found[fault]
    assert (found["nothing"], found["tp of_split"]) == (None, None)


def test_the_minority_is_blamed() -> None:
    held = [{"all": {"a": value, "b": 1}} for value in (5, 6, 6)]
    assert faults_in(held) == [Fault(0, "a", 1)]


def test_parts_that_others_do_not_hold_are_not_compared() -> None:
    held = [{"part 0": {"a": 1}}, {"part 1": {"a": 2}}, {"part 0": {"a": 1}}, {"part 1": {"a": 3}}]
    assert faults_in(held) == [Fault(3, "a", 1)]


def test_stages_of_a_pipeline_hold_different_parts() -> None:
    parts = []
    for rank in range(4):
        held = copies_of(torch.nn.Linear(2, 2), None, Launch("pipeline", 4, 4, rank, axes=Axes(pipeline=2)))
        parts.append(set(held) - {"all"})
    assert parts[0] == parts[1] != parts[2] == parts[3]
    assert len(parts[0]) == 1
    alone = copies_of(torch.nn.Linear(2, 2), None, Launch("pipeline", 2, 2, 0, axes=Axes(pipeline=2)))
    assert set(alone) == {"all"}  # nobody else has this stage


def test_what_is_split_over_all_ranks_is_not_read() -> None:
    model = torch.nn.Linear(2, 2)
    for each in model.parameters():
        vars(each)["ds_shape"] = each.shape
    assert set(copies_of(model, None, Launch("zero3", 2, 2))) == {"all"}
