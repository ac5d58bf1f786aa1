"""`--do_predict`: a line for each test row, beside the metrics of the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indictune.config.recipe import read_recipe
from indictune.preflight.checks import check_do_predict
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Task
from indictune.tasks.tokens import TokenClassification
from tests.conftest import FinishedRun
from tests.plans import codes
from tests.ranks.launching import SCRIPT, Run, python, start


def test_every_test_row_gets_its_place_label_and_scores(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ["--config", str(finished_run.recipe), "--max_steps", "2", "--do_predict", "true"]
    result = start([*python(), SCRIPT, *flags, "--output_dir", str(tmp_path / "out")])
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    test_file = finished_run.recipe.parent / "test.jsonl"
    given = [json.loads(line) for line in test_file.read_text(encoding="utf-8").splitlines()]
    assert [row["row"] for row in rows] == [f"{test_file}:{number}" for number in range(1, 12)]
    assert [row["label"] for row in rows] == [row["label"] for row in given]
    right = sum(row["label"] == row["predicted"] for row in rows)
    assert right / 11 == pytest.approx(Run(tmp_path / "out").metrics["test"]["accuracy"])
    for row in rows:
        assert max(row["scores"], key=row["scores"].get) == row["predicted"]
        assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("task", "flags", "found"),
    [
        (Classification(), ["--test_file", "t.csv"], []),
        (Classification(), [], ["needs-test-rows"]),
        (TokenClassification(), ["--test_file", "t.csv"], ["not-of-this-task"]),
    ],
    ids=["rows", "no rows", "tokens"],
)
def test_it_needs_test_rows_and_a_label_a_text(task: Task[Any, Any, Any], flags: list[str], found: list[str]) -> None:
    given = ["--train_file", "t.csv", "--output_dir", "out", "--do_predict", "true", *flags]
    plan, _ = plan_of_rows(read_recipe(given, task.arguments()), task)
    assert [code for code, _ in codes(check_do_predict(plan, task))] == found
