"""A checkpoint of two ranks holds the step at which its save began, or is not there, with and without --async_save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indictune.checkpoint import store
from tests.conftest import FinishedRun
from tests.faults.runs import STEP, Job
from tests.ranks.launching import Run, accelerate

WRITE = "indictune.checkpoint.model_state:write_shards"
WRITE_OF_A_FOLDER = "indictune.checkpoint.model_state:save"  # of two a checkpoint
LAST_FILE = "indictune.checkpoint.train_state:save_generators"  # of each rank
SAVE = "indictune.checkpoint.save:Checkpoints.save"


def job_in(folder: Path, recipe: Path, *flags: str) -> Job:
    return Job(recipe, folder, tuple(accelerate("fsdp2", 2)), ("--save_total_limit", "9", *flags))


def saved(job: Job) -> list[str]:
    """Names of the checkpoints, all of which must be whole."""
    found = store.checkpoints_in(job.folder)
    assert [store.damage(each) for each in found] == [[] for _ in found]
    return [each.name for each in found]


def kept(expected: dict[str, Any], last: int) -> list[int]:
    """The steps whose checkpoints stay, of a limit of one: the last, and the best."""
    return sorted({last, expected["best"][1]}, reverse=True)


@pytest.fixture(scope="module")
def unbroken(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What comes out where each save is waited for."""
    job = job_in(tmp_path_factory.mktemp("unbroken") / "out", finished_run.recipe)
    result = job.start()
    assert result.returncode == 0, result.stderr
    return Run(job.folder)


@pytest.fixture(scope="module")
def expected(finished_run: FinishedRun, unbroken: Run) -> dict[str, Any]:
    return Job(finished_run.recipe, unbroken.folder).outcome()


@pytest.mark.slow
def test_ranks_that_are_killed_while_they_save_leave_the_checkpoint_before(
    finished_run: FinishedRun, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 1 amid its share of the files, then rank 0 when all is there but for the name. The first save is whole
    though rank 1 was late with the last of its files."""
    job = job_in(tmp_path / "out", finished_run.recipe)
    assert job.start(f"SLOW@{LAST_FILE}:1@1+SIGKILL@os:fsync:20@1").returncode != 0  # each save has 11
    assert saved(job) == ["checkpoint-2"]
    result = job.start("SIGKILL@pathlib:Path.rename:3@0")  # torch renames two files before
    assert result.returncode != 0
    assert f"Resuming from {job.folder / 'checkpoint-2'}" in result.stderr
    assert saved(job) == ["checkpoint-2"]
    assert store.damage(job.folder / store.UNFINISHED / "checkpoint-4") == []
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {job.folder / store.PREFIX}" in result.stderr  # 2, or 4 where 2 is the best of it
    assert job.outcome() == expected
    assert not (job.folder / store.UNFINISHED).exists()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [9, 1])
def test_a_slow_write_changes_nothing(
    finished_run: FinishedRun, unbroken: Run, expected: dict[str, Any], tmp_path: Path, limit: int
) -> None:
    flags = ("--async_save", "true", "--save_total_limit", str(limit))
    job = job_in(tmp_path / "out", finished_run.recipe, *flags)
    result = job.start(f"SLOW@{WRITE}:1")
    assert result.returncode == 0, result.stderr
    assert job.outcome() == expected
    steps = (8, 6, 4, 2) if limit == 9 else kept(expected, 8)
    assert saved(job) == [f"checkpoint-{step}" for step in steps]
    for step in steps:
        found = Run(job.folder).weights_at(step)
        for name, weight in unbroken.weights_at(step).items():
            assert found[name].equal(weight), (step, name)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(
    finished_run: FinishedRun, expected: dict[str, Any], tmp_path: Path
) -> None:
    job = job_in(tmp_path / "out", finished_run.recipe, "--async_save", "true")
    # The first is still being written when steps 3 and 4 are done; the second is never written whole.
    assert job.start(f"SLOW@{WRITE}:1+SIGKILL@{WRITE_OF_A_FOLDER}:4@1").returncode != 0
    assert saved(job) == ["checkpoint-2"]
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {job.folder / 'checkpoint-2'}" in result.stderr
    assert job.outcome() == expected


def test_steps_are_done_while_a_checkpoint_is_written(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = job_in(tmp_path / "out", finished_run.recipe, "--async_save", "true")
    assert job.start(f"SLOW@{WRITE}:1+SIGKILL@{STEP}:4").returncode != 0
    assert saved(job) == []
    assert [entry["step"] for entry in Run(job.folder).log] == [3]


@pytest.mark.more
def test_a_checkpoint_is_committed_as_soon_as_all_ranks_know_that_it_is_written(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    flags = ("--async_save", "true", "--save_steps", "4", "--eval_steps", "4")
    job = job_in(tmp_path / "out", finished_run.recipe, *flags)
    # Step 5 waits until it is written, tells so, and step 6 hears it.
    assert job.start(f"SLOW@{STEP}:5+SIGKILL@{STEP}:7").returncode != 0
    assert saved(job) == ["checkpoint-4"]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_waits_for_its_checkpoint(
    finished_run: FinishedRun, expected: dict[str, Any], tmp_path: Path
) -> None:
    job = job_in(tmp_path / "out", finished_run.recipe, "--async_save", "true", "--save_total_limit", "1")
    job.start(f"SLOW@{WRITE}:2+SIGTERM@{STEP}:3@1")
    assert job.status["state"] == "resumable"
    assert job.status["message"].startswith("stopped after step 4, which is saved.")
    assert saved(job)[0] == "checkpoint-4"
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == expected
    assert saved(job) == [f"checkpoint-{step}" for step in kept(expected, 8)]


@pytest.mark.slow
def test_a_stop_within_an_epoch_waits_too(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ("--async_save", "true", "--eval_strategy", "no", "--load_best_model_at_end", "false")
    job = job_in(tmp_path / "out", finished_run.recipe, *flags)
    job.start(f"SLOW@{WRITE}:1+SIGTERM@{STEP}:1@1")
    assert job.status["message"].startswith("stopped after step 2, which is saved.")
    assert saved(job) == ["checkpoint-2"]


@pytest.mark.more
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_full_disk_is_reported_and_the_checkpoint_before_stays(
    finished_run: FinishedRun, tmp_path: Path, asynchronous: str
) -> None:
    job = job_in(tmp_path / "out", finished_run.recipe, "--async_save", asynchronous)
    result = job.start(f"FULL@{SAVE}:2")
    assert result.returncode != 0
    message = job.status["message"]
    assert f"checkpoint-4 could not be written to {job.folder}: " in message, result.stderr
    assert "checkpoint-2 is whole" in message
    assert saved(job) == ["checkpoint-2"]
    assert not list(job.folder.glob(".unfinished*"))


@pytest.mark.more
def test_another_strategy_is_refused_with_the_way_out(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--async_save", "true"))
    assert job.start().returncode == 2
    assert "[async-save-without-shards]" in job.status["message"]
