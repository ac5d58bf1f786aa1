"""`indictune sweep`: the flags that it takes and refuses, and whole sweeps of real runs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from sklearn.metrics import f1_score

from indictune.cli import main
from indictune.commands.sweep import plan_of_sweep
from indictune.commands.train import read_asked
from indictune.config.command_line import read_flags
from indictune.errors import UserError
from indictune.sweep.definition import SweepPlan
from tests.conftest import FinishedRun
from tests.ranks.launching import ROOT, python
from tests.sweep.acted import outcome

DEMO = str(ROOT / "recipes/sentiment/demo.yaml")


def planned(folder: Path, *words: str) -> SweepPlan:
    return plan_of_sweep(read_flags([DEMO, "--output_dir", str(folder / "out"), *words]))


def hash_of(number: int) -> str:
    """A word that is like no other one."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def problems(folder: Path, *words: str) -> list[tuple[str, str]]:
    """The codes and flags of what is refused."""
    with pytest.raises(UserError) as caught:
        planned(folder, *words)
    return [(each.code, each.flag) for each in caught.value.problems]


def test_a_plan_has_settings_repeats_and_the_metric_of_the_run(tmp_path: Path) -> None:
    plan = planned(tmp_path, "--grid", "learning_rate=1e-4,3e-4", "num_train_epochs=1,2", "--seeds", "3")
    assert (plan.trials, plan.metric, plan.maximises) == (4, "macro_f1", True)
    assert plan.grid == [
        {"learning_rate": rate, "num_train_epochs": epochs} for rate in ("1e-4", "3e-4") for epochs in ("1", "2")
    ]
    assert list(plan.repeats) == ["seed-17", "seed-18", "seed-19"]
    command = plan.command({"seed": ["18"], "learning_rate": ["3e-4"]}, tmp_path / "run")
    assert command[1:5] == ["-m", "indictune", "train", "classification"]
    assert read_asked(command[4:]).task == "classification"
    flags = read_flags(command[5:])
    assert flags["learning_rate"] == ["3e-4"]
    assert (flags["seed"], flags["data_seed"]) == (["18"], ["17"])  # all hold out the same rows
    assert flags["resume_from_checkpoint"] == ["auto"]
    assert flags["output_dir"] == [str(tmp_path / "run")]
    assert flags["dataset_name"] == ["builtin:tweets"]
    assert flags["report"] == flags["baseline"] == ["false"]
    search = planned(tmp_path, "--search", "learning_rate=1e-5..3e-4", "--metric", "eval_loss", "--report", "true")
    assert (search.trials, search.grid, search.metric, search.maximises) == (20, [], "loss", False)
    assert read_flags(search.command({}, tmp_path)[5:])["report"] == ["true"]
    assert search.study_name != plan.study_name


def test_the_definition_has_the_rows_but_not_the_folder(tmp_path: Path) -> None:
    rows = tmp_path / "t.jsonl"
    rows.write_text((ROOT / "indictune/data/samples/train.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--train_file", str(rows), "--grid", "learning_rate=1e-4,3e-4"]
    names = [planned(tmp_path / folder, *words).study_name for folder in ("a", "b")]
    assert names[0] == names[1]
    rows.write_text(rows.read_text(encoding="utf-8") + '{"text": "a", "label": "neutral"}\n', encoding="utf-8")
    assert planned(tmp_path / "a", *words).study_name != names[0]


def test_flags_of_rows_replace_those_of_the_recipe(tmp_path: Path) -> None:
    rows = str(tmp_path / "a.csv")
    Path(rows).touch()
    flags = planned(tmp_path, "--train_file", rows, "--seed", "3").recipe
    assert flags["task"] == ["classification"]
    assert "dataset_name" not in flags
    assert (flags["train_file"], flags["seed"], flags["learning_rate"]) == ([rows], ["3"], ["5e-4"])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--grid", "lerning_rate=1,2"], [("unknown-name", "--lerning_rate")]),
        (["--grid", "learning_rate=1e-4,low"], [("wrong-type", "--learning_rate")]),
        (["--grid", "num_train_epochs=1,2", "bf16=true,perhaps"], [("wrong-type", "--bf16")]),
        (["--search", "method=full,lorra"], [("wrong-type", "--method")]),
        (["--grid", "learning_rate=1,2", "learning_rate=3,4"], [("sweep-given-twice", "--grid")]),
        (["--grid", "learning_rate=1,2", "--learning_rate", "3"], [("sweep-given-twice", "--grid")]),
        (["--grid", "seed=1,2", "--seeds", "2"], [("sweep-sets", "--grid")]),
        (["--grid", "learning_rate=1,2", "--search", "warmup_steps=1..2"], [("sweep-grid-and-search", "--grid")]),
        (["--trials", "3"], [("sweep-needs-search", "--trials")]),
        (["--search", "warmup_steps=1..9", "--trials", "0"], [("expected-at-least", "--trials")]),
        (["--seeds", "0", "--folds", "1"], [("expected-at-least", "--folds"), ("expected-at-least", "--seeds")]),
        (["--resume_from_checkpoint", "auto"], [("sweep-sets", "--resume_from_checkpoint")]),
        (["--metric", "macro_f2"], [("metric-unknown", "--metric")]),
        (["--storage", "postgresql://me:secret@host/db"], [("token-in-the-open", "--storage")]),
        (
            ["--train_file", str(ROOT / "indictune/data/samples/train.jsonl"), "--validation_split", "0"],
            [("sweep-without-validation", "--metric")],
        ),
        (
            ["--grid", "learning_rate=1e-4", "warmup_steps=1,low", "--push_to_hub", "true"],
            [
                *(("sweep-values", "--grid"), ("sweep-sets", "--push_to_hub"), ("wrong-type", "--warmup_steps")),
            ],
        ),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(
    tmp_path: Path, words: list[str], found: list[tuple[str, str]]
) -> None:
    assert problems(tmp_path, *words) == found
    assert not (tmp_path / "out/trials").exists()


def test_folds_are_refused_for_other_tasks_and_rare_labels(tmp_path: Path) -> None:
    chat = ["llama", "--folds", "2", "--output_dir", str(tmp_path / "out")]
    with pytest.raises(UserError) as caught:
        plan_of_sweep(read_flags(chat))
    assert caught.value.code == "folds-of-other-task"
    rows = tmp_path / "t.csv"
    texts = [f"{word} film dekhi aaj humne" for word in ("achhi", "buri", "lambi", "nayi", "purani", "sundar")]
    rows.write_text("text,label\n" + "".join(f"{text},pos\n" for text in texts) + "ek,neg\n", encoding="utf-8")
    assert problems(tmp_path, "--train_file", str(rows), "--folds", "2") == [("fold-lacks-label", "--folds")]
    entries = [json.dumps({"path": str(rows), "weight": weight}) for weight in (1, 2)]
    mixed = ["--train_files", *entries, "--folds", "2"]
    assert problems(tmp_path, *mixed) == [("folds-of-mixed-files", "--folds")]


def test_folds_hold_out_each_row_once_where_runs_even_out_languages(tmp_path: Path) -> None:
    words = ["hi" if number % 3 else "te" for number in range(60)]
    texts = [f"{number * 7919} {hash_of(number)}" for number in range(60)]
    lines = [f"{text},{'ab'[at % 2]},{word}\n" for at, (text, word) in enumerate(zip(texts, words, strict=True))]
    rows = tmp_path / "t.csv"
    rows.write_text("text,label,language\n" + "".join(lines), encoding="utf-8")
    plan = planned(tmp_path, "--train_file", str(rows), "--folds", "2", "--language_sampling_alpha", "0")
    held_out = [Path(flags["test_file"][0]).read_text(encoding="utf-8") for flags in plan.repeats.values()]
    places = [json.loads(line)["row"] for file in held_out for line in file.splitlines()]
    assert sorted(places) == sorted(f"{rows}:{number}" for number in range(2, 62))
    command = plan.command({**plan.repeats["fold-0-seed-17"]}, tmp_path / "run")
    assert read_flags(command[5:])["language_sampling_alpha"] == ["0"]


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.json").write_text("{}", encoding="utf-8")
    assert problems(tmp_path) == [("output-dir-holds-files", "--output_dir")]


@pytest.mark.more
def test_a_sweep_of_folds_gives_predictions_out_of_fold(
    finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One setting of two that fails is listed, and the sweep goes on."""
    monkeypatch.chdir(finished_run.recipe.parent)
    sweep = ["sweep", "sentiment", "--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out")]
    sweep += ["--folds", "2", "--num_train_epochs", "1"]
    grid = ["--grid", "per_device_train_batch_size=4,3"]  # 3 does not divide the batch of 8
    assert main([*sweep, *grid]) == 0
    assert "fail: fold-0-seed-" in capsys.readouterr().out
    record = json.loads((tmp_path / "out/sweep.json").read_text(encoding="utf-8"))
    assert [each["state"] for each in record["trials"]] == ["complete", "fail"]
    rows = [json.loads(line) for line in (tmp_path / "out/out_of_fold.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len({row["row"] for row in rows}) == 31
    guessed = [max(row["scores"], key=row["scores"].__getitem__) for row in rows]
    joined = f1_score([row["label"] for row in rows], guessed, average="macro")
    assert record["trials"][0]["value"] == pytest.approx(joined, abs=1e-4)
    assert all({"text", "label", "language"} <= row.keys() for row in rows)
    assert all(sum(row["scores"].values()) == pytest.approx(1, abs=1e-4) for row in rows)
    named = [file for row in rows for file in [row["row"].rpartition(":")[0]]]
    assert main(["inspect", named[0], "--from_folds", str(tmp_path / "out"), "--json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)["likely_wrong"]
    assert sum(int(each[2]) for each in found["counts"]) == 31
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "Settings, the best first" in page
    best = yaml.safe_load((tmp_path / "out/best.yaml").read_text(encoding="utf-8"))
    assert best["per_device_train_batch_size"] == 4
    assert read_asked([str(tmp_path / "out/best.yaml")]).task == "classification"
    assert "test.jsonl" not in str(best.get("train_file"))
    assert main([*sweep, "--grid", "per_device_train_batch_size=4,2"]) == 2
    assert "sweep-other-definition" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_of_real_runs_that_was_stopped_and_killed_equals_one_that_was_not(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    flags = ["--search", "learning_rate=1e-4..1e-1", "--trials", "2", "--seeds", "2", "--num_train_epochs", "6"]
    words = [*python(), "-m", "indictune", "sweep", "sentiment", "--config", str(finished_run.recipe), *flags]
    words.append("--output_dir")
    assert subprocess.run([*words, str(tmp_path / "whole")], cwd=ROOT, check=False).returncode == 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([*words, str(tmp_path / "out")], cwd=ROOT) as sweep:
            while not list((tmp_path / "out").rglob("checkpoint-*")) and sweep.poll() is None:
                time.sleep(0.1)
            os.kill(sweep.pid, number)
            assert sweep.wait() == (75 if number == signal.SIGTERM else -number)
    assert subprocess.run([*words, str(tmp_path / "out")], cwd=ROOT, check=False).returncode == 0
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")
