"""A run that is killed or asked to stop goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indictune.training import checkpoints
from tests.conftest import FinishedRun
from tests.faults.runs import EVALUATION, EXIT_RESUMABLE, SAVE, STEP, Job


@pytest.fixture(scope="module")
def recipe(finished_run: FinishedRun) -> Path:
    return finished_run.recipe


@pytest.fixture(scope="module")
def unbroken(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out where nothing happens."""
    job = Job(recipe, tmp_path_factory.mktemp("unbroken") / "out")
    result = job.start()
    assert result.returncode == 0, result.stderr
    return job.outcome()


@pytest.mark.parametrize(
    ("place", "step"),
    [
        (f"{STEP}:1", 2),  # the flag is read a step later
        (f"{STEP}:3", 4),
        (f"{STEP}:7", 8),
        (f"{EVALUATION}:1", 2),
        (f"{EVALUATION}:6", 4),
        (f"{SAVE}:2", 4),
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path, place: str, step: int
) -> None:
    job = Job(recipe, tmp_path / "out")
    result = job.start(f"SIGTERM@{place}")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status["state"] == "resumable"
    assert job.status["message"] == (
        f"stopped after step {step}, which is saved. --resume_from_checkpoint auto goes on with it."
    )
    assert checkpoints.listed(job.folder)[0].name == f"checkpoint-{step}"
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == unbroken


@pytest.mark.parametrize("place", ["os:fsync:1", "os:fsync:9", "pathlib:Path.rename:1", "pathlib:Path.rename:2"])
def test_a_run_that_is_killed_while_it_saves_goes_on(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path, place: str
) -> None:
    job = Job(recipe, tmp_path / "out")
    assert job.start(f"SIGKILL@{place}").returncode == -9
    for checkpoint in checkpoints.listed(job.folder):
        assert checkpoints.damage(checkpoint) == []
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == unbroken
    assert not [path for path in job.folder.iterdir() if path.name.startswith((".unfinished", ".replaced"))]


def test_a_stop_while_rows_are_prepared_leaves_nothing_half_done(
    recipe: Path, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    job = Job(recipe, tmp_path / "out")
    result = job.start("SIGTERM@indictune.data.cache:_write_through:1", INDICTUNE_CACHE=str(cache))
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status == {
        "state": "resumable",
        "message": "stopped by SIGTERM before there was anything to save. --resume_from_checkpoint auto goes on with "
        "it.",
    }
    assert [path for path in (cache / "prepared").iterdir() if path.is_dir()] == []
    assert job.start(INDICTUNE_CACHE=str(cache)).returncode == 0
    assert job.outcome() == unbroken


def test_a_stop_in_the_last_evaluation_loses_nothing(recipe: Path, unbroken: dict[str, Any], tmp_path: Path) -> None:
    job = Job(recipe, tmp_path / "out")
    # Four evaluations of four batches come before it.
    result = job.start(f"SIGTERM@{EVALUATION}:18")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert job.status["message"].startswith(
        "stopped while the finished model was evaluated; going on evaluates it again."
    )
    assert not (job.folder / "metrics.json").exists()
    assert job.start().returncode == 0
    assert job.outcome() == unbroken
