"""When a run logs, evaluates and saves."""

from __future__ import annotations

from typing import Any

import pytest

from indictune.config.arguments import BY_EVALUATIONS
from indictune.preflight.values import check_arguments, check_evaluations, check_schedule
from tests.plans import codes, codes_of, plan_of

STEPS = {"save_strategy": "steps", "eval_strategy": "steps"}


@pytest.mark.parametrize(
    ("name", "value"), [("save_strategy", "often"), ("eval_strategy", "best"), ("logging_strategy", "x")]
)
def test_a_strategy_that_does_not_exist_is_refused(name: str, value: str) -> None:
    assert codes_of(check_schedule, plan_of({name: value})) == [("strategy-unknown", f"--{name}")]


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_steps_are_a_whole_number_or_a_share(value: float) -> None:
    assert codes_of(check_schedule, plan_of({"logging_steps": value})) == [("steps-expected", "--logging_steps")]
    assert check_schedule(plan_of({"logging_steps": 0.25})) == []


@pytest.mark.parametrize(("name", "value"), [("save_steps", 0.0), ("eval_steps", 0.0), ("save_steps", 2.5)])
def test_steps_are_checked_only_where_steps_count(name: str, value: float) -> None:
    assert check_schedule(plan_of({name: value})) == []
    assert codes_of(check_schedule, plan_of({**STEPS, name: value})) == [("steps-expected", f"--{name}")]


@pytest.mark.parametrize(
    "given", [{"early_stopping_patience": 2}, *({"lr_scheduler_type": x} for x in BY_EVALUATIONS)]
)
def test_what_reacts_to_evaluations_needs_them(given: dict[str, Any]) -> None:
    (name,) = given
    assert check_schedule(plan_of(given)) == check_evaluations(plan_of(given), has_validation=True) == []
    without = plan_of({**given, "eval_strategy": "no"})
    assert codes_of(check_schedule, without) == [("needs-evaluations", f"--{name}")]
    found = check_evaluations(plan_of(given), has_validation=False)
    assert codes(found) == [("needs-validation-rows", f"--{name}")]


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({}, False),
        ({**STEPS, "save_steps": 20.0, "eval_steps": 10.0}, False),
        ({**STEPS, "save_steps": 0.3, "eval_steps": 0.1}, False),
        ({**STEPS, "save_steps": 20.0, "logging_steps": 10.0}, False),
        ({"save_strategy": "steps", "load_best_model_at_end": False}, False),
        ({"save_strategy": "best"}, False),
        ({"save_strategy": "steps"}, True),
        ({**STEPS, "save_steps": 30.0, "eval_steps": 20.0}, True),
        ({**STEPS, "save_steps": 20.0, "eval_steps": 0.3}, True),
    ],
)
def test_the_best_checkpoint_is_saved_where_it_is_evaluated(given: dict[str, Any], is_refused: bool) -> None:
    found = [str(each) for each in check_arguments(plan_of(given))]
    assert [each.partition(" requires")[0] for each in found] == ["--load_best_model_at_end"] * is_refused


@pytest.mark.parametrize("has_validation", [True, False])
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"bf16": True}, None),  # on a machine without a GPU
        ({"bf16": True, "fp16": True}, "At most one of fp16 and bf16"),
        ({"dataloader_prefetch_factor": 2}, "--dataloader_prefetch_factor can only be set"),
    ],
)
def test_combinations_are_checked_with_and_without_validation_rows(
    given: dict[str, Any], reason: str | None, has_validation: bool
) -> None:
    found = [str(each) for each in check_evaluations(plan_of(given), has_validation)]
    assert len(found) == (reason is not None)
    assert all(each.startswith(str(reason)) for each in found)


def test_problems_that_are_reported_already_are_not_repeated() -> None:
    assert check_arguments(plan_of({**STEPS, "save_steps": 0.0, "eval_steps": 0.0})) == []
    assert check_arguments(plan_of({"warmup_steps": -1.0})) == []
