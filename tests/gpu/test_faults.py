"""On a GPU too, a run that something happens to goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FinishedRun
from tests.faults.runs import EVALUATION, EXIT_RESUMABLE, STEP, Job

pytestmark = pytest.mark.gpu

# Some kernels add in an order of their own, else.
FLAGS = ("--full_determinism", "true")


@pytest.fixture(scope="module")
def unbroken(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out where nothing happens."""
    job = Job(finished_run.recipe, tmp_path_factory.mktemp("unbroken") / "out", flags=FLAGS)
    result = job.start()
    assert result.returncode == 0, result.stderr
    return job.outcome()


@pytest.mark.parametrize("place", ["os:fsync:9", "pathlib:Path.rename:2", f"{STEP}:3", f"{STEP}:8"])
def test_a_run_that_is_killed_goes_on(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path, place: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=FLAGS)
    assert job.start(f"SIGKILL@{place}").returncode == -9
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


@pytest.mark.parametrize("place", [f"{STEP}:{step}" for step in range(1, 8)] + [f"{EVALUATION}:3"])
def test_a_run_that_is_asked_to_stop_goes_on(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path, place: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=FLAGS)
    assert job.start(f"SIGTERM@{place}").returncode == EXIT_RESUMABLE
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_a_bad_number_does_what_was_chosen(finished_run: FinishedRun, tmp_path: Path, action: str) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--on_nonfinite", action))
    result = job.start("NAN@indictune.training.loss:ExactLoss.__call__:5")
    assert result.returncode == (1 if action == "stop" else 0), result.stderr
    (line,) = (job.folder / "nonfinite.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(line)["step"], json.loads(line)["action"]) == (3, action)


def test_fp16_whose_every_gradient_overflows_ends_the_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The scale of the loss begins at 2**16."""
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--fp16", "true", "--bf16", "false", "--max_steps", "40"))
    overflows = "INFINITE_GRADIENT@indictune.training.exact:ExactTrainer.training_step:"
    result = job.start("+".join(f"{overflows}{call}" for call in range(2, 81, 2)))
    assert result.returncode == 1, result.stderr
    assert job.status["message"].startswith("fp16 has found no scale for the loss: ")
    assert "has come below 1 at step 17; training has stopped." in job.status["message"]
