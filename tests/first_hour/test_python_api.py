"""`import indictune`: train, evaluate, predict and load from Python, and the notebooks that show it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any, get_type_hints

import datasets
import httpx2
import nbformat
import numpy as np
import pandas as pd
import polars
import psutil
import pytest
import torch
from transformers import TrainerCallback

import indictune
from docs.execute_notebooks import execute
from indictune import UserError
from tests.conftest import FinishedRun
from tests.ranks.launching import ROOT, python
from tests.refusals import refused

ROWS = "text,label\n" + "".join(f"बहुत अच्छी फिल्म {n},positive\nबेकार फिल्म {n},negative\n" for n in range(20))
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    (folder / "tweets.csv").write_text(ROWS, encoding="utf-8")
    return folder


def share(right: list[int], given: list[int]) -> float:
    return sum(a == b for a, b in zip(right, given, strict=True)) / len(right)


class Steps(TrainerCallback):
    """Writes down the steps that it sees."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{state.global_step}\n")


@pytest.fixture(scope="module")
def run(folder: Path) -> indictune.Result:
    """A run from a dictionary and a table, with a metric and a callback of this program."""
    os.environ["PYTHONPATH"] = str(ROOT)
    flags = {
        "task": "classification",
        "train_file": pd.read_csv(folder / "tweets.csv"),
        "model_name_or_path": "builtin:tiny-indic-bert",
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    given: dict[str, Any] = {"metrics": {"share": share}, "callbacks": [Steps(folder / "steps")]}
    return indictune.train(flags, max_steps=3, output_dir=str(folder / "out"), **given)


def test_every_function_is_typed_and_documented() -> None:
    names = {name for name in indictune.__all__ if name.islower() and name[0] != "_"}
    assert len(names) == 12
    for name in names:
        function = getattr(indictune, name)
        assert "Raises:" in (inspect.getdoc(function) or "")
        assert "return" in inspect.get_annotations(function)
    assert get_type_hints(indictune.train)["return"] is indictune.Result


@pytest.mark.more
def test_a_dictionary_trains_and_gives_metrics_and_curves(run: indictune.Result, folder: Path) -> None:
    assert run.folder == folder / "out"
    assert run.metrics == json.loads((folder / "out/metrics.json").read_text())
    assert [row["step"] for row in run.curves] == [1, 2, 3]
    assert run.metrics["eval"]["share"] == run.metrics["eval"]["accuracy"]
    assert (folder / "steps").read_text() == "1\n2\n3\n"
    assert run.curves[0]["loss"] > 0
    recorded = indictune.Result.of(folder / "out")
    assert recorded == run


@pytest.mark.more
def test_texts_get_labels(run: indictune.Result) -> None:
    (row, empty) = indictune.predict(["बहुत अच्छी फिल्म", ""], run)
    assert row["label"] == max(row["scores"], key=row["scores"].get)
    assert sum(row["scores"].values()) == pytest.approx(1, abs=1e-5)
    assert empty["label"] is None
    assert indictune.predict("बहुत अच्छी फिल्म", run) == [row]


@pytest.mark.more
def test_a_file_or_table_is_scored_as_by_the_command(run: indictune.Result, folder: Path) -> None:
    scores = indictune.evaluate(run, folder / "tweets.csv", output_dir=folder / "scores")
    assert scores["test"]["num_examples"] == 40
    assert scores == json.loads((folder / "scores/metrics.json").read_text())
    rows = pd.read_csv(folder / "tweets.csv").to_dict("records")
    assert indictune.evaluate(run, rows, metrics={"share": share})["test"]["share"] == scores["test"]["accuracy"]


def test_a_notebook_sees_verdicts_curves_and_scores(finished_run: FinishedRun) -> None:
    run = indictune.Result.of(finished_run.folder)
    page = run._repr_html_()
    assert page.count("data:image/png;base64,") == 3
    assert "macro f1" in page.lower()
    assert "<td>" in page
    (axes,) = run.plot().axes
    assert [line.get_label() for line in axes.get_lines()] == ["training", "validation"]
    assert run.predictions["split"].value_counts().to_dict() == {"eval": 13, "test": 11}
    assert run.report() == run.folder / "report.html"


def test_a_table_an_iterator_and_a_model_in_memory_get_the_labels_of_texts(finished_run: FinishedRun) -> None:
    texts = ["बहुत अच्छी फिल्म", "చెత్త సినిమా", ""]
    rows = indictune.predict(texts, finished_run.folder)
    frame = indictune.predict(pd.DataFrame({"text": texts, "label": ["a", "b", "c"]}), finished_run.folder)
    assert frame["label"].tolist()[:2] == [row["label"] for row in rows[:2]]
    assert (frame["label"].isna().tolist(), rows[2]["label"]) == ([False, False, True], None)
    assert frame["input_label"].tolist() == ["a", "b", "c"]
    assert frame["score_positive"][:2].tolist() == pytest.approx([row["scores"]["positive"] for row in rows[:2]])
    given = iter([*texts, *["फिल्म"] * 300])
    stream = indictune.predict(given, finished_run.folder)
    assert next(stream) == rows[0]
    assert len(list(given)) == 303 - 256  # the rest was not read yet
    loaded = indictune.load(finished_run.folder)
    loaded.model.train()
    assert indictune.predict(texts[0], loaded)[0]["scores"] == pytest.approx(rows[0]["scores"], abs=1e-6)
    for column in (pd.Series(texts), np.array(texts), datasets.Dataset.from_dict({"text": texts})["text"]):
        assert indictune.predict(column, loaded)[1]["label"] == rows[1]["label"]
    with refused("wrong-type", flag="texts"):
        indictune.predict({"train": texts}, loaded)
    with refused("predict-needs-classifier", flag="model"):
        indictune.predict(texts, (loaded.model.bert, loaded.tokenizer))
    with pytest.raises(UserError):
        indictune.predict(pd.DataFrame({"xyz": texts}), loaded)


def test_tables_keep_their_columns(finished_run: FinishedRun, capfd: pytest.CaptureFixture[str]) -> None:
    texts = ["बहुत अच्छी फिल्म", "చెత్త సినిమా"]
    frame = indictune.predict(pd.DataFrame({0: [1, 2], "text": texts}, index=[7, 3]), finished_run.folder)
    assert (frame.index.tolist(), frame["0"].tolist()) == ([7, 3], [1, 2])
    table = polars.DataFrame({"text": texts, "label": ["x", "y"]}, schema_overrides={"label": polars.Categorical})
    assert indictune.predict(table, finished_run.folder)["input_label"].to_list() == ["x", "y"]
    rows = datasets.Dataset.from_dict({"text": texts}).select([1, 0])
    assert indictune.predict(rows, finished_run.folder)["text"] == texts[::-1]
    assert "examples/s" not in capfd.readouterr().err
    both = {"text": texts, "label": [1, 2], "input_label": [3, 4]}
    tables = pd.DataFrame(both), polars.DataFrame(both), datasets.Dataset.from_dict(both)
    for several in (*tables, pd.DataFrame(both).to_dict("records")):
        with refused("column-duplicate", flag="texts"):
            indictune.predict(several, finished_run.folder)
    with refused("wrong-type", flag="train_file"):
        indictune.train("sentiment", train_file=table.lazy())


def test_a_metric_that_was_corrected_is_the_new_one(finished_run: FinishedRun, tmp_path: Path) -> None:
    loaded, rows = indictune.load(finished_run.folder), [{"text": "अच्छा", "label": "positive"}] * 2
    loaded.model.train()
    found = [
        indictune.evaluate(loaded, rows, metrics={"mine": lambda *_, each=each: each}, output_dir=tmp_path)
        for each in (1.0, 0.25)
    ]
    assert [each["test"]["mine"] for each in found] == [1.0, 0.25]
    assert loaded.model.training  # as it was


@pytest.mark.more
def test_a_server_ends_with_its_program(run: indictune.Result) -> None:
    program = f"import indictune; print(indictune.serve({str(run.folder)!r})._process.pid)"
    done = subprocess.run([*python(), "-c", program], capture_output=True, encoding="utf-8", check=True)
    assert not psutil.pid_exists(int(done.stdout.split()[-1]))


@pytest.mark.more
def test_a_trainer_trains_here_and_its_model_is_scored_here(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    done = subprocess.run([*python(), str(program), str(tmp_path)], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    here, there = json.loads((tmp_path / "found.json").read_text())
    assert here["test"]["loss"] == pytest.approx(there["test"].pop("loss"), abs=1e-6)
    assert {name: here["test"][name] for name in there["test"]} == there["test"]
    assert here["test"]["num_examples"] == 11
    assert done.stdout.splitlines()[-1] == "trained 2 steps, IndicTrainer"


_PROGRAM = """
import json, sys
from pathlib import Path
import indictune

folder = Path(sys.argv[1])
samples = [json.loads(line) for line in Path("indictune/data/samples/test.jsonl").read_text().splitlines()]
flags = {"model_name_or_path": "builtin:tiny-indic-bert", "max_length": 32, "max_steps": 2}
flags["validation_file"] = samples[40:]
trainer = indictune.trainer("sentiment", train_file=samples[:40], output_dir=folder / "out", **flags)
trainer.train()
trainer.save_model(folder / "model")
model = trainer.model, trainer.processing_class
given = {"metrics": {"rows": lambda right, given: len(right)}, "max_length": 32}
here = indictune.evaluate(model, samples[-11:], **given)
there = indictune.evaluate(folder / "model", samples[-11:], **given)
Path(folder, "found.json").write_text(json.dumps([here, there]))
print(f"trained {trainer.state.global_step} steps, {type(trainer).__name__}")
"""


@pytest.mark.more
def test_rows_are_inspected_runs_compared_and_a_server_started_and_stopped(
    run: indictune.Result, folder: Path
) -> None:
    rows = pd.read_csv(folder / "tweets.csv")
    assert indictune.inspect(rows, task="sentiment", model_name_or_path="builtin:tiny-indic-bert")["rows"]
    assert indictune.compare(run, run.folder)["overall"]["difference"]["value"] == 0
    assert indictune.plan("sentiment/demo.yaml")["candidates"]
    with indictune.serve(run) as server:
        answered = httpx2.post(f"{server.url}/predict", json={"texts": ["बहुत अच्छी फिल्म"]}).json()
    (row,) = indictune.predict("बहुत अच्छी फिल्म", run)
    assert answered["predictions"][0]["label"] == row["label"]
    assert "stopped" in repr(server)
    with pytest.raises(UserError):
        indictune.serve(folder)


@pytest.mark.more
def test_a_model_is_loaded_ready_to_use(run: indictune.Result) -> None:
    model, tokenizer = indictune.load(run.folder)
    assert not model.training
    inputs = tokenizer("बहुत अच्छी फिल्म", return_tensors="pt")
    with torch.inference_mode():
        scores = model(**inputs).logits.softmax(-1)[0]
    (row,) = indictune.predict(["बहुत अच्छी फिल्म"], run)
    assert list(row["scores"].values()) == pytest.approx(scores.tolist(), abs=1e-5)


@pytest.mark.more
def test_mistakes_are_raised_as_problems(folder: Path, tmp_path: Path) -> None:
    rows = str(folder / "tweets.csv")
    with pytest.raises(UserError) as early:
        indictune.train("sentiment", train_file=rows, lr=1, bs=2)
    assert [(each.code, each.flag) for each in early.value.problems] == [
        ("unknown-name", "--lr"),
        ("unknown-name", "--bs"),
    ]
    for function in (indictune.load, lambda model: indictune.predict(["a"], model)):
        with pytest.raises(UserError):
            function(tmp_path)
    with pytest.raises(UserError) as missing:
        indictune.train({"train_file": rows})
    assert missing.value.code == "task-missing"


@pytest.mark.slow
def test_launch_flags_may_be_keys_and_problems_keep_theirs(
    run: indictune.Result, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = folder / "r.yaml"
    recipe.write_text("train_file: no.csv\nmax_length: many\n", encoding="utf-8")
    flags = {"task": "classification", "config": recipe, "strategy": "ddp", "num_processes": 1}
    with pytest.raises(UserError) as refused:
        indictune.train(flags, output_dir=str(run.folder))
    found = {each.code: each for each in refused.value.problems}
    assert {code: each.flag for code, each in found.items()} == {
        "wrong-type": f"{recipe}: max_length",
        "output-dir-holds-files": "--output_dir",
        "no-such-file": "--train_file",
    }
    assert all(str(each).startswith(each.flag) for each in found.values())
    line = next(line for line in capsys.readouterr().out.splitlines() if "accelerate launch" in line)
    assert "ddp.yaml --num_processes 1 " in line


def test_a_dry_run_is_a_matter_of_the_command_line(folder: Path) -> None:
    rows = str(folder / "tweets.csv")
    with pytest.raises(UserError) as refused:
        indictune.train("sentiment", train_file=rows, dry_run=True, output_dir=str(folder / "dry"))
    assert (refused.value.code, refused.value.flag) == ("only-as-command", "--dry_run")
    assert not (folder / "dry").exists()


@pytest.mark.more
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_keeps_its_outputs_and_pictures(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [output for cell in nbformat.read(path, as_version=4).cells for output in cell.get("outputs", ())]  # type: ignore[no-untyped-call]
    assert {"text/html", "image/png"} <= {kind for output in kept for kind in output.get("data", {})}
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outputs = [output for cell in execute(path, tmp_path).cells for output in cell.get("outputs", ())]
    assert any("widget-view" in str(output) or "step/s" in str(output) for output in outputs), "a progress bar"


def test_there_are_three_notebooks() -> None:
    assert len(NOTEBOOKS) == 3
