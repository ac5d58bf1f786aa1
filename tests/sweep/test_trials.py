"""Trials of a sweep are tried, pruned, resumed and shared; what fails is recorded, and the sweep goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import optuna
import psutil
import pytest
from filelock import FileLock
from optuna.trial import TrialState

from indictune.stop_signals import Stopped
from indictune.sweep import trials as trials_module
from indictune.sweep.definition import check_definition
from indictune.sweep.trials import Trials
from tests.refusals import refused
from tests.sweep.acted import ACTING, acted_sweep, manifests, outcome, started, swept
from tests.sweep.acting_run import save

GRID = {"learning_rate": "1e-4,1e-3"}
FAILING = {"ends": "failed,well,user_error"}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "_WAIT_S", 0.05)


def test_a_grid_is_tried_in_order_and_the_best_keeps_its_weights(tmp_path: Path) -> None:
    trials = swept(acted_sweep(tmp_path / "out", GRID, seeds=2))
    first, second = trials.all()
    assert [each.params["learning_rate"] for each in (first, second)] == ["1e-4", "1e-3"]
    assert [each.number for each in trials.ranked()] == [1, 0]
    assert second.value == pytest.approx(0.9 + 0.001 * (3 + 4) / 2)
    assert second.user_attrs["values"] == pytest.approx({"seed-17": 0.903, "seed-18": 0.904})
    weights = [path.relative_to(tmp_path / "out/trials") for path in (tmp_path / "out").rglob("model.safetensors")]
    assert {path.parts[0] for path in weights} == {"0001"}
    assert len(weights) == 2 * (1 + 3)  # the models, and those of their checkpoints
    assert (tmp_path / "out/trials/0000/seed-17/predictions.jsonl").exists()
    assert "learning_rate: 1e-3" in (tmp_path / "out/best.yaml").read_text(encoding="utf-8")


def test_settings_that_fail_or_are_refused_are_recorded_and_the_sweep_goes_on(tmp_path: Path) -> None:
    trials = swept(acted_sweep(tmp_path / "out", FAILING))
    states = [each["state"] for each in outcome(tmp_path / "out")["trials"]]
    assert states == ["fail", "complete", "fail"]
    assert trials.all()[0].user_attrs["message"] == "seed-17: it ends as failed"
    assert trials.all()[2].user_attrs["message"] == "seed-17: it ends as user_error"


def test_a_first_setting_that_is_refused_ends_the_sweep_and_is_tried_again(tmp_path: Path) -> None:
    plan = acted_sweep(tmp_path / "out", {"ends": "user_error,well", **GRID})
    with refused("sweep-first-refused", "it ends as user_error"):
        swept(plan)
    assert [each.state.name for each in Trials(plan).all()] == ["RUNNING"]
    check_definition(plan.folder, {"weight_decay": "0.02"})  # the corrected command


@pytest.mark.parametrize("content", [b"no database, but a text\n" * 100, pytest.param(None, marks=pytest.mark.more)])
def test_a_storage_that_is_damaged_or_no_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    plan = acted_sweep(tmp_path / "out", GRID)
    if content is None:
        (tmp_path / "out/sweep.db").mkdir()
    else:
        (tmp_path / "out/sweep.db").write_bytes(content)
    with refused("sweep-storage", "sweep.db", flag="--storage"):
        Trials(plan)


def test_a_storage_whose_driver_is_missing_or_that_is_no_url_is_refused(tmp_path: Path) -> None:
    for url in ("mysql+nodriver://host/db", "nonsense"):
        with refused("sweep-storage", url, flag="--storage"):
            Trials(acted_sweep(tmp_path / "out", GRID, storage=url))


def test_a_storage_in_use_is_refused(tmp_path: Path) -> None:
    plan = acted_sweep(tmp_path / "out", GRID, storage=f"sqlite:///{tmp_path}/shared.db?timeout=0.1")
    trials = Trials(plan)
    other = sqlite3.connect(tmp_path / "shared.db")
    other.execute("BEGIN EXCLUSIVE")
    with refused("sweep-storage", "locked"):
        trials.run_all(lambda: None)
    other.close()
    assert len(swept(plan).ranked()) == 2


def test_another_sweep_in_the_folder_is_refused_by_what_differs(tmp_path: Path) -> None:
    definition = {"weight_decay": "0.01", "seeds": "1"}
    check_definition(tmp_path, definition)
    (tmp_path / "sweep.json").write_text(json.dumps({"definition": definition}), encoding="utf-8")
    check_definition(tmp_path, definition)
    with refused("sweep-other-definition", "weight_decay was 0.01, and is 0.1", "seeds was 1, and is 3"):
        check_definition(tmp_path, {"weight_decay": "0.1", "seeds": "3"})


@pytest.mark.more
def test_more_trials_may_be_asked_for_later(tmp_path: Path) -> None:
    swept(acted_sweep(tmp_path / "out", trials=2))
    before = outcome(tmp_path / "out")["trials"]
    swept(acted_sweep(tmp_path / "out", trials=3))
    swept(acted_sweep(tmp_path / "whole", trials=3))
    assert outcome(tmp_path / "out")["trials"][:2] == before
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


@pytest.mark.more
def test_a_trial_of_a_sweep_that_runs_is_not_taken(tmp_path: Path) -> None:
    plan = acted_sweep(tmp_path / "out", GRID)
    study, begun = (
        Trials(plan).study,
        optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={"owner": "other"}),
    )
    study.add_trial(begun)
    assert [each.state.name for each in swept(plan).all()] == ["RUNNING", "COMPLETE"]  # on another machine
    folder = plan.folder_of(0, "")
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"):
        assert [each.state.name for each in swept(plan).all()] == ["RUNNING", "COMPLETE"]  # of this folder
    assert [each.state.name for each in swept(plan).all()] == ["COMPLETE", "COMPLETE"]


@pytest.mark.more
@pytest.mark.parametrize("names", [("one", "other"), ("one", "one")])
def test_sweeps_that_start_at_once_share_a_storage(tmp_path: Path, names: tuple[str, str]) -> None:
    grid = {"learning_rate": "1e-2,1e-3,1e-4,1e-5"}
    plans = [acted_sweep(tmp_path / name, grid, storage=f"sqlite:///{tmp_path}/shared.db") for name in names]
    processes = [started(plan) for plan in plans]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    trials = Trials(plans[0]).all()
    assert [each.state.name for each in trials] == ["COMPLETE"] * 4
    assert [each.params["learning_rate"] for each in trials] == ["1e-2", "1e-3", "1e-4", "1e-5"]
    ran = [path.parent.parent.name for path in tmp_path.rglob("seed-17/metrics.json")]
    assert sorted(ran) == ["0000", "0001", "0002", "0003"]


@pytest.mark.more
def test_a_run_that_a_killed_sweep_left_behind_is_waited_for(tmp_path: Path) -> None:
    plan = acted_sweep(tmp_path / "out", GRID)
    process = started(plan)
    lock = plan.folder_of(0, "seed-17") / ".lock"
    while not (lock.exists() and lock.read_text(encoding="utf-8")):
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert [each.state.name for each in swept(plan).all()] == ["COMPLETE", "COMPLETE"]
    swept(acted_sweep(tmp_path / "whole", GRID))
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole")


def test_evaluations_count_in_their_order_as_the_checkpoints_of_the_flags_have_them(tmp_path: Path) -> None:
    trials = Trials(acted_sweep(tmp_path / "out", trials=20))
    for score in (0.4, 0.5, 0.6, 0.7, 0.8):
        trials.study.add_trial(
            optuna.trial.create_trial(value=score, intermediate_values=dict.fromkeys((1, 2, 3), score))
        )
    texts, rows = manifests(), [{"step": 2, "eval_macro_f1": 0.65}]
    assert trials._judged(tmp_path) == ({}, False)
    save(tmp_path, 2, rows, texts["2 planned"])
    save(tmp_path, 3, [*rows, {"step": 3, "eval_macro_f1": 0.1}], texts["3 asked"])  # by a signal
    assert trials._judged(tmp_path) == ({1: 0.65}, False)
    rows += [{"step": step, "eval_macro_f1": 0.5} for step in (3, 4)]
    save(tmp_path, 4, rows, texts["4 planned"])
    assert trials._judged(tmp_path) == ({1: 0.65, 2: 0.5, 3: 0.5}, False)  # the best so far counts
    low = [{"step": step, "eval_macro_f1": 0.1} for step in (5, 6)]
    for step, folder in ((5, "worse"), (6, "at the end")):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder, step, low[step - 5 :][:1], texts[f"{step} planned"])
    assert trials._judged(tmp_path / "worse") == ({1: 0.1}, True)
    assert trials._judged(tmp_path / "at the end") == ({1: 0.1}, False)


def test_a_run_that_was_stopped_from_elsewhere_stops_the_sweep(tmp_path: Path) -> None:
    plan = acted_sweep(tmp_path / "out", {"ends": "resumable,well", **GRID})
    with pytest.raises(Stopped):
        swept(plan)
    assert [each.state.name for each in Trials(plan).all()] == ["RUNNING"]


def kill_at_random(folder: Path, kills: int, trials: int) -> None:
    """Run a sweep that is killed so often, with or without its run, or stopped, and let it end."""
    draw = random.Random()
    for number in range(kills):
        plan = acted_sweep(folder, trials=trials, seeds=2)
        process = started(plan)
        process.join(draw.uniform(0.05, 1.5))
        how = draw.choice(("sweep alone", "all", "run stopped"))
        print(number, how)
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            if how == "all":
                _kill_runs(plan.folder)
        process.join()
    swept(acted_sweep(folder, trials=trials, seeds=2))


def _kill_runs(folder: Path) -> None:
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or []
        if ACTING in words and any(word.startswith(str(folder)) for word in words):
            each.kill()


@pytest.mark.parametrize(
    ("kills", "trials"), [pytest.param(3, 10, marks=pytest.mark.more), pytest.param(20, 14, marks=pytest.mark.slow)]
)
def test_a_sweep_that_is_killed_at_random_equals_one_that_was_not(tmp_path: Path, kills: int, trials: int) -> None:
    swept(acted_sweep(tmp_path / "whole", trials=trials, seeds=2))
    whole = outcome(tmp_path / "whole")
    assert {"complete", "pruned"} == {each["state"] for each in whole["trials"]}
    kill_at_random(tmp_path / "killed", kills, trials)
    assert outcome(tmp_path / "killed") == whole
