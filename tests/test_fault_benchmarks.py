"""The scoreboard of faults counts what it says."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from benchmarks import fault_suites
from benchmarks.fault_cases import SUITES, case_of
from benchmarks.fault_launches import _gone_on, told_way_out
from benchmarks.fault_numbers import done_about, is_told, largest_divisor
from benchmarks.fault_rows import (
    CORRUPTIONS,
    GRACE_S,
    _cases,
    _not_written,
    _stopped,
    lost_by_a_kill,
    names_the_file,
    saved_what_is_told,
    seconds_since,
    told_of_the_disk,
)
from benchmarks.fault_runs import (
    DDP,
    LATER,
    ONE,
    ZERO2,
    ZERO3_OFFLOAD,
    Job,
    contenders,
    ended,
    gone_on_from,
    logged,
    newest_whole,
    tells_of_going_on,
)
from benchmarks.fault_sizes import say_step
from benchmarks.faults import COUNTS, TITLES, parts
from indictune.checkpoint import store
from indictune.checkpoint.store import UNFINISHED
from indictune.data.read_files import read_batches
from indictune.supervise import run_folder
from indictune.train import bad_steps
from tests import fuzz_readers
from tests.conftest import FinishedRun
from tests.faults.faulty import FOLDER, hit
from tests.plain_readers import are_same, cells_of, plain_records, plain_rows
from tests.ranks.launching import ROOT


class Unbroken(Job):
    """A run of which the unbroken one is there already."""

    @cached_property
    def unbroken(self) -> tuple[Path, float]:
        return self.work, 1.0


@pytest.fixture(scope="module")
def run(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run with the checkpoints of steps 2, 3 and 4, which differ in what tells the step."""
    folder = tmp_path_factory.mktemp("faults") / "out"
    shutil.copytree(finished_run.folder, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    for step in (2, 3, 4):
        say_step(Path(shutil.copytree(store.listed(finished_run.folder)[0], folder / "checkpoint-99")), step)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "out"))


def test_a_checkpoint_that_says_another_step_is_whole(copy: Path) -> None:
    assert [store.step_of(each) for each in store.listed(copy)] == [4, 3, 2]
    assert [store.damage(each) for each in store.listed(copy)] == [[], [], []]


@pytest.mark.parametrize("how", CORRUPTIONS)
def test_a_corrupted_checkpoint_is_damaged(copy: Path, how: str) -> None:
    CORRUPTIONS[how](copy / "checkpoint-4" / "trainer_state.json")
    damaged = [store.step_of(each) for each in store.listed(copy) if store.damage(each)]
    assert damaged == ([4, 3] if how == "swapped" else [4])


def test_each_file_is_corrupted_in_each_way_that_changes_it(run: Path) -> None:
    cases = [(name, corrupt) for name, corrupt in _cases(run / "checkpoint-4")]
    ways = {name: {corrupt for each, corrupt in cases if each == name} for name, _ in cases}
    assert ways["manifest.json"] == ways["trainer_state.json"] == set(CORRUPTIONS.values())
    assert ways["config.json"] == set(CORRUPTIONS.values()) - {CORRUPTIONS["stale"], CORRUPTIONS["swapped"]}


def test_a_file_is_named_where_it_is_told_what_is_wrong_with_it(copy: Path) -> None:
    path = copy / "checkpoint-4" / "config.json"
    assert not names_the_file(f"Going on from {path.parent}\nWritten to {copy}: config.json, model.safetensors", path)
    assert not names_the_file(f"{path.parent / 'adapter_config.json'} is missing", path)
    path.unlink()
    assert names_the_file("\n".join(store.damage(path.parent)), path)
    state = copy / "checkpoint-3" / "trainer_state.json"
    shutil.copy(copy / "checkpoint-2" / "manifest.json", state.parent)
    assert names_the_file("\n".join(store.damage(state.parent)), state.parent / "manifest.json")


def test_a_disk_is_told_of_where_a_line_has_the_path_and_the_error(tmp_path: Path) -> None:
    silent = f"Going on from {tmp_path}/checkpoint-2\niostream error: No space left on device"
    assert not any(told_of_the_disk(silent, tmp_path).values())
    told = told_of_the_disk(f"{tmp_path}/a: Permission denied", tmp_path)
    assert told == {"named the path and the error": 1, "told the bytes needed": 0}
    whole = f"{tmp_path}: No space left on device. It needs 7,041 bytes"
    assert all(told_of_the_disk(whole, tmp_path).values())


def test_a_disk_that_refuses_writes_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric makes a folder of its own in the system's for such."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "out"))
    monkeypatch.setattr(os, "makedirs", os.makedirs)  # what stands there now is put back
    hit("EROFS@os:makedirs:2")
    for name in ("elsewhere", "out", "elsewhere too"):
        os.makedirs(tmp_path / name)
    with pytest.raises(OSError, match="Read-only file system"):
        os.makedirs(tmp_path / "out" / "checkpoint-1")
    os.makedirs(tmp_path / "still elsewhere")


def test_a_stop_is_told_by_75_or_by_the_status(copy: Path) -> None:
    assert [tells_of_going_on(copy, code, is_of_the_run=True) for code in (75, 1, -15, None)] == [True] + 3 * [False]
    assert not tells_of_going_on(copy, 75, is_of_the_run=False)
    run_folder.write_status(copy, "resumable", "stopped after step 4, which is saved.")
    assert tells_of_going_on(copy, 1, is_of_the_run=False)
    assert saved_what_is_told(copy)
    run_folder.write_status(copy, "resumable", "stopped after step 3, which is saved.")
    assert not saved_what_is_told(copy)


@pytest.mark.slow
def test_the_time_from_a_signal_to_the_end_of_a_run_is_told(tmp_path: Path) -> None:
    ours = contenders(tmp_path)[0]
    job = Job(ours, tmp_path)
    after, never = (f"{ours.places['after a step']}:{step}" for step in (3, 99))
    found = _stopped(job, [after, never])
    assert 0 < found.pop("seconds at most") < GRACE_S
    assert found == {"within 30 s": 1, "ended before it": 1, "told": 1, "exact": 1}


def test_a_signal_is_noted_once(tmp_path: Path) -> None:
    assert seconds_since(tmp_path / "signalled") is None
    (tmp_path / "signalled").write_text(str(time.monotonic() - 40), encoding="ascii")
    assert GRACE_S < 40 <= (seconds_since(tmp_path / "signalled") or 0) < 41
    assert seconds_since(tmp_path / "signalled") is None


def test_exact_is_the_log_too(run: Path, copy: Path) -> None:
    contender = contenders(copy)[0]
    job = Unbroken(contender, run)
    assert job.judged(copy, 0, "", 0) == "exact"
    log = copy / "train_log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    for spoilt in (lines[:-1], [*lines, lines[-1]], [lines[0].replace('"loss": ', '"loss": 1'), *lines[1:]]):
        log.write_text("".join(spoilt), encoding="utf-8")
        assert job.judged(copy, 0, "", 0) == "exact but for its log"
    entry = json.loads(lines[0])
    assert logged(run)[0] == (entry["step"], entry["loss"], entry["learning_rate"])


def test_a_run_has_ended_when_its_metrics_are_written_and_its_last_start_gave_0(run: Path, copy: Path) -> None:
    job = Unbroken(contenders(copy)[0], run)
    assert [job.judged(copy, code, "", 0) for code in (0, 1, -9, None)] == ["exact", *["stuck"] * 3]
    (copy / "metrics.json").unlink()
    assert (copy / "model.safetensors").exists()
    assert job.judged(copy, 0, "", 0) == "stuck"
    (copy / "train_log.jsonl").unlink()  # as the stock Trainer's, whose model is all
    assert ended(copy)


def test_a_run_that_starts_afresh_does_steps_again(run: Path, copy: Path) -> None:
    job = Unbroken(contenders(copy)[0], run)
    elsewhere = f"Going on from {copy}-2/checkpoint-4"
    for said in ("", f"Going on from {copy}/checkpoint-2", elsewhere, f"{copy}/checkpoint-4 holds no step"):
        assert job.judged(copy, 0, said, newest_whole(copy)) == "did steps again"
    went_on = f"rank 0: Going on from {copy}/checkpoint-4\n"
    assert job.judged(copy, 0, went_on, newest_whole(copy)) == "exact"
    again = f"Going on from {copy}/checkpoint-2\n{went_on}"
    assert gone_on_from(again, copy) == 4


def test_the_newest_whole_checkpoint_is_that_of_its_manifest_or_of_the_stock_state(copy: Path, tmp_path: Path) -> None:
    (copy / "checkpoint-4" / "config.json").write_text("{}", encoding="utf-8")
    assert newest_whole(copy) == 3
    (copy / "train_log.jsonl").unlink()  # as the stock Trainer's, which looks at no file
    assert newest_whole(copy) == 4
    (copy / "checkpoint-4" / "trainer_state.json").unlink()
    assert newest_whole(copy) == 3
    assert newest_whole(tmp_path / "none") == 0


def test_a_kill_may_leave_no_torn_checkpoint_and_cost_a_step(copy: Path, tmp_path: Path) -> None:
    assert lost_by_a_kill(tmp_path / "none").total() == 0
    log = copy / "train_log.jsonl"
    entry = json.loads(log.read_text(encoding="utf-8").splitlines()[0])
    lines = [json.dumps({**entry, "step": step}) + "\n" for step in (1, 2, 3, 4, 5)]
    log.write_text("".join(lines) + '{"step": 9', encoding="utf-8")
    assert +lost_by_a_kill(copy) == {"had a checkpoint": 1}
    (copy / "checkpoint-4" / "config.json").write_text("{}", encoding="utf-8")
    lost = Counter({"had a checkpoint": 1, "left one that is torn": 1, "lost more than a step": 1})
    assert lost_by_a_kill(copy) == lost
    shutil.rmtree(copy / "checkpoint-4")
    assert +lost_by_a_kill(copy) == lost - Counter({"left one that is torn": 1})


def test_what_a_full_disk_leaves_is_partial_or_nothing(run: Path, copy: Path) -> None:
    def left() -> int:
        (copy / "metrics.json").touch()
        again = Path(shutil.copytree(copy, copy.with_name("again")))
        job = Restarted(contenders(run)[0], run, starts=[(0, 4)])
        return _not_written(job, again, 1, "")["a partial checkpoint left"]

    assert left() == 0
    (copy / UNFINISHED).mkdir()
    assert left() == 0
    (copy / UNFINISHED / "checkpoint-5").mkdir()
    assert left() == 1


@pytest.mark.parametrize(
    ("event", "loss", "is_right"),
    [
        ("NAN@a", "nan", True),
        ("NAN@a", "inf", False),
        ("NAN@a", 0.0, False),
        ("INFINITE@a", "inf", True),
        ("INFINITE@a", 1.5, False),
        ("NAN_GRADIENT@a", 1.5, True),
        ("INFINITE_GRADIENT@a", 0.0, False),
    ],
)
def test_the_loss_of_a_bad_step_is_told_as_it_was(copy: Path, event: str, loss: float | str, is_right: bool) -> None:
    log, record = copy / "train_log.jsonl", copy / bad_steps.FILE
    told = json.dumps({"step": 3, "loss": loss, "learning_rate": 0.1}) + "\n"
    log.write_text(told, encoding="utf-8")
    assert is_told(copy, 3, event, 1.5) == is_right
    assert not is_told(copy, 4, event, 1.5)
    log.write_text("", encoding="utf-8")
    record.write_text(told, encoding="utf-8")
    assert is_told(copy, 3, event, 1.5) == is_right


@dataclass(frozen=True)
class Restarted(Unbroken):
    """A run whose starts give these codes and say that they go on from these steps; one that fails loses a checkpoint,
    one that gives 0 ends the run."""

    starts: list[tuple[int | None, int]] = field(default_factory=list)

    def run(self, folder: Path, *_: Any, **__: Any) -> tuple[int | None, str]:
        code, step = self.starts.pop(0)
        if code == 0:
            (folder / "metrics.json").touch()
        else:
            shutil.rmtree(store.listed(folder)[0])
        return code, f"Going on from {folder}/checkpoint-{step}\n{step}\n" if step else ""


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([(0, 4)], {"exact": 1}),
        ([(0, 0)], {"did steps again": 1}),
        ([(1, 4), (1, 3), (0, 4)], {"exact": 1, LATER: 1, "a start gave 1: 4": 1, "a start gave 1: 3": 1}),
        ([(None, 4), (0, 3)], {"did steps again": 1, LATER: 1, "a start hung, and was killed after 180 s": 1}),
        ([(1, 4), (1, 3), (1, 2)], {"stuck": 1}),
    ],
)
def test_a_run_is_started_until_a_start_gives_0_and_goes_on_from_what_it_had(
    run: Path, copy: Path, starts: list[tuple[int | None, int]], found: dict[str, int]
) -> None:
    (copy / "metrics.json").unlink()
    assert Restarted(contenders(copy)[0], run, starts=starts).until_it_ends(copy) == found
    assert starts == []


def test_a_run_of_other_steps_or_epochs_than_are_told_is_not_counted(copy: Path) -> None:
    job = Unbroken(contenders(copy)[0], copy)
    with pytest.raises(RuntimeError, match=r"^4 steps in 2\.0 epochs, not 8 in 2$"):
        _gone_on(job, 1)
    log, state = copy / "train_log.jsonl", copy / "checkpoint-4" / "trainer_state.json"
    log.write_text(2 * log.read_text(encoding="utf-8"), encoding="utf-8")
    told = json.loads(state.read_text(encoding="utf-8"))
    state.write_text(json.dumps(told | {"epoch": 0.8}), encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"^8 steps in 0\.8 epochs, not 8 in 2$"):
        _gone_on(job, 1)


def test_a_run_that_had_ended_has_nothing_to_go_on_with(run: Path, copy: Path) -> None:
    assert Restarted(contenders(copy)[0], run, starts=[(0, 0)]).until_it_ends(copy) == {"exact": 1}


def test_as_much_as_can_be_is_rolled_back() -> None:
    assert [largest_divisor(step) for step in (1, 2, 3, 4, 9, 12, 19, 20)] == [1, 1, 1, 2, 3, 6, 1, 10]


@pytest.mark.parametrize(("policy", "word"), [("stop", "stopped"), ("skip", "skipped"), ("rollback", "rolled back")])
def test_what_is_done_about_a_bad_step_counts_where_it_is_noted_told_and_done(
    copy: Path, policy: str, word: str
) -> None:
    code = 1 if policy == "stop" else 0
    told = "The loss or the gradient of step 3 is NaN or infinite; training has stopped"
    run_folder.write_status(copy, "failed" if code else "ok", told if code else "")
    said = (
        f"warning: the loss or the gradient of step 3 is NaN or infinite: {policy}; its loss was nan; its rows: a:1\n"
    )
    record = copy / bad_steps.FILE
    noted = json.dumps({"step": 3, "action": policy}) + "\n"
    record.write_text(noted, encoding="utf-8")
    change_weights(copy / "checkpoint-4")
    about = (3, policy, 1)
    assert done_about(copy, *about, code, said) == word
    record.write_text(json.dumps({"step": 2, "action": policy}) + "\n" + noted, encoding="utf-8")
    assert done_about(copy, *about, code, said).startswith("failed")
    record.write_text(noted, encoding="utf-8")
    assert done_about(copy, *about, -9, said).startswith("failed: gave -9")
    assert done_about(copy, 4, policy, 1, code, said).startswith("failed")
    if policy == "stop":
        run_folder.write_status(copy, "failed", "RuntimeError: something else")
    else:
        assert done_about(copy, *about, code, "").startswith("failed")
        change_weights(copy / "checkpoint-3")
    assert done_about(copy, *about, code, said).startswith("failed")


def change_weights(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).add_(0.1 * store.step_of(checkpoint))
    save_file(weights, path)


def test_every_cell_is_run_or_told_why_not(tmp_path: Path) -> None:
    both = contenders(tmp_path)
    filled = parts(both[0], both[1], COUNTS["full"])
    cells = {(row, each.title) for row in TITLES for each in both}
    assert cells == set(filled)
    assert COUNTS["short"].keys() == COUNTS["full"].keys()


def test_what_is_put_to_both_is_the_same(tmp_path: Path) -> None:
    ours, stock = contenders(tmp_path)
    filled: Any = parts(ours, stock, COUNTS["full"])
    for row, run in {
        "11": fault_suites.wrong_launches,
        "14": fault_suites.canaries,
        "15": fault_suites.tokens,
        "16": fault_suites.best_outside,
    }.items():
        for each in (ours, stock):
            assert [part.args for part in filled[row, each.title] if getattr(part, "func", None) == run] == [(each,)]


def test_a_launch_that_the_trainer_cannot_run_is_told_with_the_reason(tmp_path: Path) -> None:
    ours, stock = contenders(tmp_path)
    assert ours.launches.keys() - stock.launches.keys() == set(stock.cannot)
    assert not ours.cannot
    (reason,) = stock.cannot.values()
    assert reason.startswith("not run: ")
    every: Any = parts(ours, stock, COUNTS["full"])
    mine, theirs = every["9", ours.title], every["9", stock.title]
    assert [list(part.args[0].launches) for part in mine] == [[name] for name in list(ours.launches)[:5]]
    assert theirs[2](tmp_path) == stock.cannot
    assert [next(iter(part.args[0].launches)) for part in theirs[:2] + theirs[3:]] == [ONE, DDP, ZERO2, ZERO3_OFFLOAD]


def test_a_stranger_is_told_with_its_row_or_not() -> None:
    judged = partial(fault_suites.judged_stranger, line=13)
    assert judged(0, "train.jsonl:13") == "trained in silence"
    said = "ValueError: no\n  File a\nIndexError: Target 3 is out of bounds"
    assert judged(1, said) == "ended by IndexError, which names no row"
    assert judged(1, f"{said}: train.jsonl:13") == "ended by IndexError, which names the row"
    assert judged(1, f"{said}: train.jsonl:130").endswith("names no row")


NOT = "the command that is told does not go on"


@pytest.mark.parametrize(
    ("step", "code", "ends"), [(4, 0, {"largest difference of losses": 0.0}), (2, 0, {NOT: 1}), (4, 1, {NOT: 1})]
)
def test_a_command_that_is_told_is_typed_and_judged(
    run: Path, copy: Path, step: int, code: int, ends: dict[str, float]
) -> None:
    job = Unbroken(contenders(copy)[0], run)
    says = f"on from {copy}/checkpoint-{step}"
    command = shlex.join(["python", "-c", f"print('Going', {says!r}); raise SystemExit({code})"])
    said = f"ZeRO's states cannot be carried over. Go on with it by `{command}`. If it was trained otherwise, so."
    assert told_way_out(job, copy, said, newest=4) == {"told the way out": 1} | ends
    assert told_way_out(job, copy, "Go on with it.", newest=4) == {"told the way out": 0}


class Collected:
    """A plugin that keeps what pytest finds, as `tests/test_a.py::Class::test[values]`."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


def test_as_many_tests_count_for_the_cases_of_a_row_as_are_promised() -> None:
    chosen = [test for cases in SUITES.values() for tests in cases.values() for test in tests]
    assert len(set(chosen)) == len(chosen)
    collected = Collected()
    words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *chosen]
    assert pytest.main(words, [collected]) == 0
    assert len(collected.tests) > 300
    found = {row: counted(row, collected.tests) for row in SUITES}
    assert all(count for cases in found.values() for count in cases.values())
    assert found["11"].total() >= 40
    assert found["12"]["bad files"] >= 60
    assert found["12"].total() - found["12"]["good files"] - found["12"]["bad files"] >= 12
    assert found["16"].total() - found["16"]["vocabularies that are links"] >= 40


def counted(row: str, collected: list[str]) -> Counter[str]:
    found = Counter[str]()
    for test in collected:
        file, _, name = test.partition("::")
        with suppress(ValueError):  # another row's
            found[case_of(row, f"{file.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}")] += 1
    return Counter({title: found[title] for title in SUITES[row]})


def test_the_tests_of_all_rows_run_by_the_target_of_faults() -> None:
    words = ["make", "--dry-run", "test-faults"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {test.partition("::")[0] for tests in SUITES["11"].values() for test in tests}
    assert {"tests/faults", *files} <= set(said)


def test_a_test_counts_for_the_case_that_names_it_and_for_no_other() -> None:
    module = "tests.faults.test_canaries"
    assert case_of("14", f"{module}.TestADataset.test_any[a.csv]") == "a dataset"
    assert case_of("14", f"{module}.TestACheckpoint.test_from_elsewhere_is_refused") == "a checkpoint"
    for name in ("TestACheckpoint.test_from_elsewhere_is_refused_too", "TestACheckpoint", "TestADatasets.test_any"):
        with pytest.raises(ValueError, match="row 14 has no case"):
            case_of("14", f"{module}.{name}")


def test_the_tests_of_a_row_are_counted_by_case_and_by_how_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = {"one": "assert 1", "two": "assert 0", "three": "import pytest; pytest.skip()"}
    body = "".join(f"def test_{name}():\n    {does}\n" for name, does in tests.items())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(body, encoding="utf-8")
    monkeypatch.setattr(fault_suites, "ROOT", tmp_path)
    cases = {"a": ("tests/test_a.py::test_one", "tests/test_a.py::test_two"), "b": ("tests/test_a.py::test_three",)}
    monkeypatch.setitem(SUITES, "11", cases)
    assert fault_suites.suite("11", tmp_path) == {"a": {"passed": 1, "failure": 1}, "b": {"skipped": 1}}
    monkeypatch.setitem(SUITES, "11", {"a": ("tests/test_a.py::test_four",)})
    with pytest.raises(RuntimeError, match="test_four"):
        fault_suites.suite("11", tmp_path)


def test_what_a_launch_came_to_is_what_was_trained_or_the_message(tmp_path: Path) -> None:
    came_up = partial(fault_suites.what_came_up, tmp_path)
    said = "trained as DistributedDataParallel on 2 process(es)\ntrained as DistributedDataParallel on 2 process(es)\n"
    assert came_up(0, said) == "trained as DistributedDataParallel on 2 process(es)"
    ours = "rows: 32\nfsdp2 on 2 process(es), global batch of 8 rows"
    assert came_up(0, ours) == "trained as fsdp2 on 2 process(es)"
    assert came_up(1, f"{ours}\n[rank0]: ValueError: no\nOSError: x") == "ended by ValueError: no"
    assert came_up(None, ours) == "ended by None"
    run_folder.write_status(tmp_path, "user_error", "2 problems:\n  1. --bf16")
    assert came_up(2, "ValueError: no") == "ended by 2 problems: 1. --bf16"


def test_the_fuzzer_tells_how_many_files_were_read_and_the_one_that_broke_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = fuzz_readers.Outcomes()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert fuzz_readers.fuzz(tmp_path, 0.02, 0, 1.0, outcomes) is None
    files, as_datasets = fuzz_readers.told(outcomes).values()
    assert files["count"] == as_datasets["count"] > 0
    for each in (files, as_datasets):
        assert sum(sum(counts.values()) for counts in each["by kind"].values()) == each["count"]
        assert sum(each["by outcome"].values()) == each["count"]
    monkeypatch.setattr(fuzz_readers, "stands_in", lambda *_: False)
    broken = fuzz_readers.fuzz(tmp_path, 1, 0, 0.0, outcomes)
    assert broken is not None
    assert "is not in the file" in broken


def without_first(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(1)


def backwards(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(range(batch.num_rows)[::-1]))


def shifted(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.rename_columns([{"text": "label", "label": "text"}.get(name, name) for name in batch.schema.names])


@pytest.mark.parametrize("wrong", [without_first, backwards, shifted])
def test_the_fuzzer_finds_what_stands_in_the_file_and_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    read = read_batches
    monkeypatch.setattr(fuzz_readers, "read_batches", lambda *given: map(wrong, read(*given)))
    broken = fuzz_readers.fuzz(tmp_path, 1, 0, 0.0, fuzz_readers.Outcomes())
    assert broken is not None
    assert "AssertionError: [(" in broken


@pytest.mark.parametrize("reader", ["read_batches", "read_records"])
def test_the_fuzzer_finds_a_row_that_is_dropped_in_silence_beside_one_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    read: Callable[..., Iterator[Any]] = getattr(fuzz_readers, reader)

    def dropping(*given: Any) -> list[Any]:
        found, is_bad = list(read(*given)), given[-1].count > 0
        if reader == "read_batches":
            return [*map(without_first, found)] if is_bad else found
        return found[is_bad:]

    monkeypatch.setattr(fuzz_readers, reader, dropping)
    broken = fuzz_readers.fuzz(tmp_path, 1, 0, 0.0, fuzz_readers.Outcomes())
    assert broken is not None
    assert " are bad, [" in broken


@pytest.mark.parametrize(
    ("name", "content", "rows", "number"),
    [
        ("a.csv", 'text,label\n"a\nb",x\n\nNA,y\n"c"d,z\ne\n', [("a\nb", "x", None), ("NA", "y", None)], 4),
        ("a.jsonl", '{"label": "x", "text": "a\\\\"}\n{"text": 1\n\n[]\n', [("a\\", "x", None)], 3),
        ("a.json", '{"data": [{"text": 1e5, "language": "hi"}, 3]}', [(1e5, None, "hi")], 2),
    ],
)
def test_what_the_readers_are_compared_with(
    tmp_path: Path, name: str, content: str, rows: list[tuple[object, ...]], number: int
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert [cells for cells in map(cells_of, plain_records(tmp_path / name)) if cells] == rows
    assert len(plain_rows(tmp_path / name)) == number
    assert are_same([tuple("1e5" if cell == 1e5 else cell for cell in row) for row in rows], rows, is_all=True)
    assert not are_same(rows[1:], rows, is_all=True)
    assert are_same(rows[1:], rows, is_all=False)
    assert not are_same([*rows, *rows], rows, is_all=False)
