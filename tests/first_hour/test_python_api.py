"""`import indictune`: train, evaluate, predict and load from Python, and the notebooks that show it."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import get_type_hints

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import indictune
from indictune import UserError
from tests.ranks.launching import ROOT

ROWS = "text,label\n" + "".join(f"बहुत अच्छी फिल्म {n},positive\nबेकार फिल्म {n},negative\n" for n in range(20))
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    (folder / "tweets.csv").write_text(ROWS, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> indictune.Result:
    """A run from a dictionary."""
    os.environ["PYTHONPATH"] = str(ROOT)
    flags = {
        "task": "classification",
        "train_file": str(folder / "tweets.csv"),
        "logging_steps": 1,
        "learning_rate": 1e-3,
    }
    return indictune.train(flags, max_steps=3, output_dir=str(folder / "out"), warmup_steps=None)


def test_every_function_is_typed_and_documented() -> None:
    for name in ("train", "evaluate", "predict", "load"):
        function = getattr(indictune, name)
        assert "Raises:" in (inspect.getdoc(function) or "")
        assert "return" in inspect.get_annotations(function)
    assert get_type_hints(indictune.train)["return"] is indictune.Result


@pytest.mark.more
def test_a_dictionary_trains_and_gives_metrics_and_curves(run: indictune.Result, folder: Path) -> None:
    assert run.folder == folder / "out"
    assert run.metrics == json.loads((folder / "out/metrics.json").read_text())
    assert [row["step"] for row in run.curves] == [1, 2, 3]
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
def test_a_file_is_scored_as_by_the_command(run: indictune.Result, folder: Path) -> None:
    scores = indictune.evaluate(run, folder / "tweets.csv", output_dir=folder / "scores")
    assert scores["test"]["num_examples"] == 40
    assert scores == json.loads((folder / "scores/metrics.json").read_text())


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
    for refused in (indictune.load, lambda model: indictune.predict(["a"], model)):
        with pytest.raises(UserError):
            refused(tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    book = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in book.cells), "commit it without outputs"
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    bars = [
        out
        for cell in book.cells
        for out in cell.get("outputs", [])
        if "widget-view" in str(out) or "step/s" in str(out)
    ]
    assert bars, "a run in a notebook has a progress bar"


def test_there_are_two_notebooks() -> None:
    assert len(NOTEBOOKS) == 2
