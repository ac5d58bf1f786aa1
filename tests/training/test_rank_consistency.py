"""Ranks compare the flags that change their steps."""

from __future__ import annotations

from indictune.training.rank_consistency import compared_flags


def test_what_differs_between_ranks_by_itself_is_not_compared() -> None:
    """The deepspeed launcher gives each rank its own --local_rank, and a message must hold no token."""
    assert not compared_flags(["local_rank", "hub_token", "train_file", "output_dir"]) & {
        *("local_rank", "hub_token", "train_file", "output_dir")
    }


def test_flags_of_the_steps_and_of_the_schedule_are_compared() -> None:
    assert {"learning_rate", "eval_steps"} <= compared_flags(["learning_rate"])
