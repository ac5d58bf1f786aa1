"""The fault scoreboard counts what its titles say."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import fault_suites
from benchmarks.fault_contenders import contenders
from benchmarks.fault_launches import resumed_at_each
from benchmarks.fault_numbers import action_taken, largest_divisor, logs_the_loss
from benchmarks.fault_rows import CORRUPTIONS, corruption_cases, losses_by_a_kill, names_the_file
from benchmarks.fault_runs import LATER, Job, ended, logged, newest_whole, resumed_from, says_it_is_resumable
from benchmarks.fault_sizes import renumber_step
from benchmarks.fault_stops import (
    GRACE_S,
    outcomes_of_a_refused_write,
    outcomes_of_stops,
    saved_the_reported_step,
    seconds_since,
)
from benchmarks.faults import COUNTS, TITLES, parts
from indictune.checkpoint import store
from indictune.checkpoint.store import UNFINISHED
from indictune.supervise import run_folder
from indictune.training import bad_steps
from tests.conftest import FinishedRun
from tests.faults.faulty import FOLDER, hit
from tests.ranks.launching import ROOT


@dataclass(frozen=True)
class Restarted(Job):
    """A run whose unbroken run exists, and whose starts end with these codes and resume at these steps.

    A start that fails loses a checkpoint; one that succeeds ends the run.
    """

    starts: list[tuple[int | None, int]] = field(default_factory=list)

    @cached_property
    def unbroken(self) -> tuple[Path, float]:
        return self.work, 1.0

    def run(self, folder: Path, *_: Any, **__: Any) -> tuple[int | None, str]:
        code, step = self.starts.pop(0)
        if code == 0:
            (folder / "metrics.json").touch()
        else:
            shutil.rmtree(store.checkpoints_in(folder)[0])
        return code, f"Resuming from {folder}/checkpoint-{step}\n{step}\n" if step else ""


@pytest.fixture(scope="module")
def run(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run with a checkpoint of each of the steps 2, 3 and 4."""
    folder = tmp_path_factory.mktemp("faults") / "out"
    shutil.copytree(finished_run.folder, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    for step in (2, 3, 4):
        newest = store.checkpoints_in(finished_run.folder)[0]
        renumber_step(Path(shutil.copytree(newest, folder / "checkpoint-99")), step)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "out"))


def job(work: Path, *starts: tuple[int | None, int]) -> Restarted:
    return Restarted(contenders(work)[0], work, starts=list(starts))


def change_weights(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).add_(0.1 * store.step_of(checkpoint))
    save_file(weights, path)


def test_a_renumbered_checkpoint_is_whole(copy: Path) -> None:
    assert [store.step_of(each) for each in store.checkpoints_in(copy)] == [4, 3, 2]
    assert [store.damage(each) for each in store.checkpoints_in(copy)] == [[], [], []]


@pytest.mark.parametrize("way", CORRUPTIONS)
def test_a_corrupted_checkpoint_is_damaged(copy: Path, way: str) -> None:
    CORRUPTIONS[way](copy / "checkpoint-4" / "trainer_state.json")
    damaged = [store.step_of(each) for each in store.checkpoints_in(copy) if store.damage(each)]
    assert damaged == ([4, 3] if way == "swapped" else [4])


def test_each_file_is_corrupted_in_each_way_that_changes_it(run: Path) -> None:
    cases = list(corruption_cases(run / "checkpoint-4"))
    ways = {name: {way for each, way in cases if each == name} for name, _ in cases}
    assert ways["manifest.json"] == ways["trainer_state.json"] == CORRUPTIONS.keys()
    assert ways["config.json"] == CORRUPTIONS.keys() - {"stale", "swapped"}


def test_a_file_is_named_by_a_line_with_its_path_and_problem(copy: Path) -> None:
    path = copy / "checkpoint-4" / "config.json"
    assert not names_the_file(f"Resuming from {path.parent}\nWritten to {copy}: config.json", path)
    assert not names_the_file(f"{path.parent / 'adapter_config.json'} is missing", path)
    path.unlink()
    assert names_the_file("\n".join(store.damage(path.parent)), path)
    state = copy / "checkpoint-3" / "trainer_state.json"
    shutil.copy(copy / "checkpoint-2" / "manifest.json", state.parent)
    assert names_the_file("\n".join(store.damage(state.parent)), state.parent / "manifest.json")


def test_a_refused_write_is_counted_by_what_the_run_reported_and_left(run: Path, copy: Path) -> None:
    def outcomes(output: str) -> Counter[str]:
        (copy / "metrics.json").touch()
        again = Path(shutil.copytree(copy, copy.with_name("again")))
        return outcomes_of_a_refused_write(job(run, (0, 4)), again, 1, output.replace("OUT", str(again)))

    silent = +outcomes("Resuming from OUT/checkpoint-2\niostream error: No space left on device")
    assert silent == {"failed with an exit code": 1, "exact": 1}
    whole = outcomes("OUT/a: No space left on device. It needs 7,041 bytes")
    assert (whole["named the path and the error"], whole["named the bytes needed"]) == (1, 1)
    (copy / UNFINISHED / "checkpoint-5").mkdir(parents=True)
    assert outcomes("")["left a partial checkpoint"] == 1


def test_only_writes_into_the_run_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "out"))
    monkeypatch.setattr(os, "makedirs", os.makedirs)  # restores it afterwards
    hit("EROFS@os:makedirs:2")
    for name in ("elsewhere", "out", "elsewhere too"):
        os.makedirs(tmp_path / name)
    with pytest.raises(OSError, match="Read-only file system"):
        os.makedirs(tmp_path / "out" / "checkpoint-1")


def test_a_stopped_run_is_resumable_by_exit_code_75_or_by_its_status(copy: Path) -> None:
    assert [says_it_is_resumable(copy, code, is_of_the_run=True) for code in (75, 1, None)] == [True, False, False]
    assert not says_it_is_resumable(copy, 75, is_of_the_run=False)
    run_folder.write_status(copy, "resumable", "stopped after step 4, which is saved.")
    assert says_it_is_resumable(copy, 1, is_of_the_run=False)
    assert saved_the_reported_step(copy)
    run_folder.write_status(copy, "resumable", "stopped after step 3, which is saved.")
    assert not saved_the_reported_step(copy)


@pytest.mark.slow
def test_the_time_from_a_signal_to_the_end_of_a_run_is_measured(tmp_path: Path) -> None:
    ours = contenders(tmp_path)[0]
    after, never = (f"{ours.places['after a step']}:{step}" for step in (3, 99))
    found = outcomes_of_stops(Job(ours, tmp_path), [after, never])
    assert 0 < found.pop("seconds at most") < GRACE_S
    assert found == {"within 30 s": 1, "ended before the signal": 1, "said that it is resumable": 1, "exact": 1}


def test_a_signal_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "signalled").write_text(str(time.monotonic() - 40), encoding="ascii")
    assert 40 <= (seconds_since(tmp_path / "signalled") or 0) < 41
    assert seconds_since(tmp_path / "signalled") is None


def test_exact_includes_the_log(run: Path, copy: Path) -> None:
    assert job(run).verdict(copy, 0, "", 0) == "exact"
    log = copy / "train_log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    for changed in (lines[:-1], [*lines, lines[-1]], [lines[0].replace('"loss": ', '"loss": 1'), *lines[1:]]):
        log.write_text("".join(changed), encoding="utf-8")
        assert job(run).verdict(copy, 0, "", 0) == "exact except its log"
    entry = json.loads(lines[0])
    assert logged(run)[0] == (entry["step"], entry["loss"], entry["learning_rate"])


def test_a_run_has_ended_when_its_metrics_exist_and_its_last_start_succeeded(run: Path, copy: Path) -> None:
    assert [job(run).verdict(copy, code, "", 0) for code in (0, 1, -9, None)] == ["exact", *["stuck"] * 3]
    (copy / "metrics.json").unlink()
    assert job(run).verdict(copy, 0, "", 0) == "stuck"
    (copy / "train_log.jsonl").unlink()  # as the stock Trainer's, which writes no more than the model
    assert ended(copy)


def test_a_run_that_starts_afresh_repeats_steps(run: Path, copy: Path) -> None:
    elsewhere = f"Resuming from {copy}-2/checkpoint-4"
    for output in ("", f"Resuming from {copy}/checkpoint-2", elsewhere, f"{copy}/checkpoint-4 holds no step"):
        assert job(run).verdict(copy, 0, output, newest_whole(copy)) == "repeated steps"
    resumed = f"rank 0: Resuming from {copy}/checkpoint-4\n"
    assert job(run).verdict(copy, 0, resumed, newest_whole(copy)) == "exact"
    assert resumed_from(f"Resuming from {copy}/checkpoint-2\n{resumed}", copy) == 4


def test_a_kill_is_counted_by_what_it_left(copy: Path, tmp_path: Path) -> None:
    assert losses_by_a_kill(tmp_path / "none").total() == 0
    log = copy / "train_log.jsonl"
    entry = json.loads(log.read_text(encoding="utf-8").splitlines()[0])
    lines = [json.dumps({**entry, "step": step}) + "\n" for step in (1, 2, 3, 4, 5)]
    log.write_text("".join(lines) + '{"step": 9', encoding="utf-8")
    assert +losses_by_a_kill(copy) == {"had a checkpoint": 1}
    (copy / "checkpoint-4" / "config.json").write_text("{}", encoding="utf-8")
    lost = Counter({"had a checkpoint": 1, "left a torn checkpoint": 1, "lost more than a step": 1})
    assert losses_by_a_kill(copy) == lost
    assert newest_whole(copy) == 3
    log.unlink()  # as the stock Trainer's, whose state file says that a checkpoint is whole
    assert newest_whole(copy) == 4


@pytest.mark.parametrize(
    ("event", "loss", "is_right"),
    [
        ("NAN@a", "nan", True),
        ("NAN@a", "inf", False),
        ("INFINITE@a", "inf", True),
        ("INFINITE@a", 1.5, False),
        ("NAN_GRADIENT@a", 1.5, True),
        ("INFINITE_GRADIENT@a", 0.0, False),
    ],
)
def test_a_bad_step_must_log_its_true_loss(copy: Path, event: str, loss: float | str, is_right: bool) -> None:
    log, record = copy / "train_log.jsonl", copy / bad_steps.FILE
    entry = json.dumps({"step": 3, "loss": loss, "learning_rate": 0.1}) + "\n"
    log.write_text(entry, encoding="utf-8")
    assert logs_the_loss(copy, 3, event, 1.5) == is_right
    assert not logs_the_loss(copy, 4, event, 1.5)
    log.write_text("", encoding="utf-8")
    record.write_text(entry, encoding="utf-8")
    assert logs_the_loss(copy, 3, event, 1.5) == is_right


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([(0, 4)], {"exact": 1}),
        ([(0, 0)], {"repeated steps": 1}),
        ([(1, 4), (0, 3)], {"repeated steps": 1, LATER: 1, "a start ended with 1: 4": 1}),
        ([(None, 4), (0, 4)], {"exact": 1, LATER: 1, "a start was killed after 180 s": 1}),
        ([(1, 4), (1, 3), (1, 2)], {"stuck": 1}),
    ],
)
def test_a_run_is_restarted_until_it_succeeds(
    run: Path, copy: Path, starts: list[tuple[int | None, int]], found: dict[str, int]
) -> None:
    (copy / "metrics.json").unlink()
    assert job(run, *starts).restart_until_it_ends(copy) == found


def test_a_run_with_other_steps_or_epochs_is_not_counted(copy: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^4 steps in 2\.0 epochs, not 8 in 2$"):
        resumed_at_each(job(copy), COUNTS["short"])


def test_a_rollback_undoes_as_many_steps_as_possible() -> None:
    assert [largest_divisor(step) for step in (1, 2, 3, 4, 9, 12, 19, 20)] == [1, 1, 1, 2, 3, 6, 1, 10]


@pytest.mark.parametrize(("policy", "word"), [("stop", "stopped"), ("skip", "skipped"), ("rollback", "rolled back")])
def test_an_action_counts_if_it_was_recorded_and_taken(copy: Path, policy: str, word: str) -> None:
    code = 1 if policy == "stop" else 0
    run_folder.write_status(copy, "failed" if code else "ok", "step 3 is NaN" if code else "")
    record = copy / bad_steps.FILE
    noted = json.dumps({"step": 3, "action": policy}) + "\n"
    record.write_text(noted, encoding="utf-8")
    change_weights(copy / "checkpoint-4")
    assert action_taken(copy, 3, policy, 1, code) == word
    assert action_taken(copy, 3, policy, 1, -9).startswith("failed: exit code -9")
    assert action_taken(copy, 4, policy, 1, code).startswith("failed")
    record.write_text(json.dumps({"step": 2, "action": policy}) + "\n" + noted, encoding="utf-8")
    assert action_taken(copy, 3, policy, 1, code).startswith("failed")
    record.write_text(noted, encoding="utf-8")
    if policy == "stop":
        run_folder.write_status(copy, "failed", "RuntimeError: something else")
    else:
        change_weights(copy / "checkpoint-3")
    assert action_taken(copy, 3, policy, 1, code).startswith("failed")


def test_each_cell_of_the_scoreboard_is_filled(tmp_path: Path) -> None:
    ours, stock = contenders(tmp_path)
    filled = parts(ours, stock, COUNTS["full"])
    assert {(row, each.title) for row in TITLES for each in (ours, stock)} == filled.keys()
    assert ours.launches.keys() - stock.launches.keys() == set(stock.unsupported)
    assert filled["9", stock.title][-1](tmp_path) == stock.unsupported


@pytest.mark.more
def test_tests_are_counted_by_file_and_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all((ROOT / file).exists() for files in fault_suites.SUITES.values() for file in files)
    body = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\n"
    (tmp_path / "test_a.py").write_text(body, encoding="utf-8")
    monkeypatch.setattr(fault_suites, "ROOT", tmp_path)
    assert fault_suites.count_tests(("test_a.py",), tmp_path) == {"test_a": {"passed": 1, "failure": 1, "skipped": 1}}
    with pytest.raises(RuntimeError, match=r"no_such\.py"):
        fault_suites.count_tests(("no_such.py",), tmp_path)
