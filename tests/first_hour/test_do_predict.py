"""`predictions.jsonl` and `evaluation.json`, beside the metrics of the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indictune.config.recipe import read_recipe
from indictune.evaluation.breakdown import read_breakdowns
from indictune.preflight.checks import check_do_predict
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Task
from indictune.tasks.tokens import TokenClassification
from tests.conftest import FinishedRun
from tests.plans import codes
from tests.ranks.launching import python, start


def test_every_row_gets_its_place_label_and_scores(finished_run: FinishedRun) -> None:
    rows = predictions(finished_run.folder)
    for split, name, count in (("eval", "validation", 13), ("test", "test", 11)):
        file = finished_run.recipe.parent / f"{name}.jsonl"
        given = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        some = [row for row in rows if row["split"] == split]
        assert [row["row"] for row in some] == [f"{file}:{number}" for number in range(1, count + 1)]
        assert [row["number"] for row in some] == list(range(count))
        for key in ("label", "language"):
            assert [row[key] for row in some] == [row[key] for row in given]
        scripts = ["native" if row["script"] != "Latn" else "romanised" for row in given]
        assert [row["script"] for row in some] == scripts
        right = sum(row["label"] == row["predicted"] for row in some)
        assert right / count == pytest.approx(finished_run.metrics[split]["accuracy"])
    for row in rows:
        assert max(row["scores"], key=row["scores"].get) == row["predicted"]
        assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)


def test_scores_for_whom_are_those_of_the_metrics(finished_run: FinishedRun) -> None:
    temperature = json.loads((finished_run.folder / "config.json").read_text()).get("calibration_temperature")
    for split, found in read_breakdowns(finished_run.folder).items():
        block = finished_run.metrics[split]
        assert found.overall.scores["macro_f1"].value == pytest.approx(block["macro_f1"])
        for language, scores in block["per_language"].items():
            assert found.by["language"][language].scores["macro_f1"].value == pytest.approx(scores["macro_f1"])
        assert found.calibration is not None
        assert found.calibration.ece == pytest.approx(block["ece"])
        assert found.calibration.temperature == temperature


def test_an_evaluation_of_the_saved_model_writes_the_same(finished_run: FinishedRun, tmp_path: Path) -> None:
    file = finished_run.recipe.parent / "test.jsonl"
    flags = ["--model", str(finished_run.folder), "--test_file", str(file), "--output_dir", str(tmp_path / "out")]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 0, result.stderr
    assert read_breakdowns(tmp_path / "out")["test"] == read_breakdowns(finished_run.folder)["test"]
    assert predictions(tmp_path / "out") == [row for row in predictions(finished_run.folder) if row["split"] == "test"]


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("task", "flags", "found"),
    [
        (Classification(), ["--test_file", "t.csv"], []),
        (Classification(), [], ["needs-test-rows"]),
        (TokenClassification(), [], ["needs-test-rows"]),
    ],
    ids=["rows", "no rows", "tokens"],
)
def test_do_predict_needs_test_rows(task: Task[Any, Any, Any], flags: list[str], found: list[str]) -> None:
    given = ["--train_file", "t.csv", "--output_dir", "out", "--do_predict", "true", *flags]
    plan, _ = plan_of_rows(read_recipe(given, task.arguments), task)
    assert [code for code, _ in codes(check_do_predict(plan))] == found
