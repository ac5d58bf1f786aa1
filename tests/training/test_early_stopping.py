"""A run that gets no better stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.preflight.derive import with_least_steps
from tests.conftest import FinishedRun
from tests.plans import plan_of
from tests.ranks.launching import python, train


def test_it_stops_after_the_evaluations_that_were_allowed(finished_run: FinishedRun, tmp_path: Path) -> None:
    """At learning rate 0 the evaluation of step 4 is no better than that of step 2; the run has 8 steps."""
    every_two = ("--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2")
    flags = ("--learning_rate", "0", *every_two, "--early_stopping_patience", "1")
    run = train(python(), tmp_path / "out", "--config", str(finished_run.recipe), *flags)
    assert [entry["step"] for entry in run.log] == [2, 4]
    assert len(finished_run.log) == 4
    assert run.metrics["eval"]["num_examples"] == 13


def test_a_small_file_is_seen_more_often() -> None:
    """90 rows are two steps an epoch; 600 steps are ten evaluations."""
    plan = with_least_steps(plan_of({"min_steps": 600, "num_train_epochs": 6.0}), rows=90, has_validation=True)
    assert (plan.training.num_train_epochs, plan.training.early_stopping_patience) == (300.0, 3)
    assert (plan.training.eval_strategy, plan.training.eval_steps, plan.training.save_steps) == ("steps", 0.1, 0.1)


@pytest.mark.parametrize(
    ("given", "rows"),
    [({"min_steps": 600}, 12_800), ({"min_steps": 600, "max_steps": 2}, 90), ({"min_steps": 0}, 90)],
)
def test_a_run_that_is_long_enough_or_has_its_steps_stays_as_it_is(given: dict[str, int], rows: int) -> None:
    plan = plan_of(given)
    assert with_least_steps(plan, rows, has_validation=True) == plan


EVERY_20 = {"eval_strategy": "steps", "eval_steps": 20, "save_strategy": "steps", "save_steps": 20}


@pytest.mark.parametrize(
    ("given", "has_validation", "patience"),
    [
        ({}, False, None),
        ({"eval_strategy": "epoch"}, True, 90),  # of 300 evaluations
        (EVERY_20, True, 9),
        ({"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}, True, None),
        ({"eval_strategy": "epoch", "early_stopping_patience": 2}, True, 2),
    ],
)
def test_a_longer_run_ends_early_by_the_evaluations_that_it_has(
    given: dict[str, object], has_validation: bool, patience: int | None
) -> None:
    plan = with_least_steps(plan_of({"min_steps": 600, **given}), 90, has_validation)
    assert (plan.training.num_train_epochs, plan.training.early_stopping_patience) == (300.0, patience)
    assert str(plan.training.eval_strategy) == given.get("eval_strategy", "epoch")
