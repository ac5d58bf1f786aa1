"""Ranks compare the flags that change their steps."""

from __future__ import annotations

from indictune.config.plan import Launch
from indictune.training.rank_consistency import compared_flags, values_of_node
from tests.plans import plan_of


def test_what_differs_between_ranks_by_itself_is_not_compared() -> None:
    """The deepspeed launcher gives each rank its own --local_rank, and a message must hold no token."""
    assert not compared_flags(["local_rank", "hub_token", "train_file", "output_dir"]) & {
        *("local_rank", "hub_token", "train_file", "output_dir")
    }


def test_flags_of_the_steps_and_of_the_schedule_are_compared() -> None:
    assert {"learning_rate", "eval_steps"} <= compared_flags(["learning_rate"])


def test_nodes_compare_packages_code_flags_and_strategy_but_no_paths() -> None:
    environ = {"FSDP_VERSION": "2", "HOME": "/root"}
    given = {"learning_rate": 0.5, "output_dir": "/a", "train_file": "/a/rows.csv", "hub_token": "secret"}
    found = values_of_node(plan_of(given, launch=Launch("fsdp2", 4, 2), environ=environ), {"class_weights": [1, 2]})
    names = {"version of torch", "version of python", "version of indictune", "--learning_rate", "strategy"}
    assert names | {"FSDP_VERSION", "class weights", "tensor size"} <= found.keys()
    assert (found["--learning_rate"], found["class weights"]) == (0.5, [1, 2])
    assert not {"/a", "/a/rows.csv", "secret", "/root"} & set(map(str, found.values()))
