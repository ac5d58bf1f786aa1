"""A run that gets no better stops."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import FinishedRun
from tests.ranks.launching import python, train


def test_it_stops_after_the_evaluations_that_were_allowed(finished_run: FinishedRun, tmp_path: Path) -> None:
    """At learning rate 0 the evaluation of step 4 is no better than that of step 2; the run has 8 steps."""
    every_two = ("--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2")
    flags = ("--learning_rate", "0", *every_two, "--early_stopping_patience", "1")
    run = train(python(), tmp_path / "out", "--config", str(finished_run.recipe), *flags)
    assert [entry["step"] for entry in run.log] == [2, 4]
    assert len(finished_run.log) == 4
    assert run.metrics["eval"]["num_examples"] == 13
