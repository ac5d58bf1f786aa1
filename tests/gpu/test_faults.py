"""On a GPU too, a run with a fault resumes as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from indictune.checkpoint import store
from tests.conftest import FinishedRun
from tests.faults.runs import EVALUATION, EXIT_RESUMABLE, STEP, Job
from tests.ranks.launching import accelerate, python

pytestmark = pytest.mark.gpu

# Without it, some kernels add in a random order.
FP32 = ("--full_determinism", "true")
BF16 = (*FP32, "--bf16", "true")  # another attention kernel, which draws its own random numbers
FP16 = (*FP32, "--fp16", "true", "--bf16", "false")

Unbroken = Callable[[tuple[str, ...]], dict[str, Any]]


@pytest.fixture(scope="module")
def unbroken(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The outcome of a run without a fault, by its flags."""

    @cache
    def outcome(flags: tuple[str, ...]) -> dict[str, Any]:
        job = Job(finished_run.recipe, tmp_path_factory.mktemp("unbroken") / "out", flags=flags)
        result = job.start()
        assert result.returncode == 0, result.stderr
        return job.outcome()

    return outcome


def test_bf16_is_another_run(unbroken: Unbroken) -> None:
    assert unbroken(BF16)["weights"] != unbroken(FP32)["weights"]


@pytest.mark.parametrize(
    ("place", "flags"),
    [(place, FP32) for place in ("os:fsync:9", "pathlib:Path.rename:2", f"{STEP}:3", f"{STEP}:8")]
    + [(f"{STEP}:3", BF16)],
)
def test_a_killed_run_resumes(
    finished_run: FinishedRun, unbroken: Unbroken, tmp_path: Path, place: str, flags: tuple[str, ...]
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start(f"SIGKILL@{place}").returncode == -9
    assert job.start().returncode == 0
    assert job.outcome() == unbroken(flags)


@pytest.mark.parametrize(
    ("place", "flags"),
    [(place, FP32) for place in (*(f"{STEP}:{step}" for step in range(1, 8)), f"{EVALUATION}:3")]
    + [(place, BF16) for place in (f"{STEP}:3", f"{EVALUATION}:3")],
)
def test_a_stopped_run_resumes(
    finished_run: FinishedRun, unbroken: Unbroken, tmp_path: Path, place: str, flags: tuple[str, ...]
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start(f"SIGTERM@{place}").returncode == EXIT_RESUMABLE
    assert job.start().returncode == 0
    assert job.outcome() == unbroken(flags)


def test_fp16_resumes_with_its_loss_scale(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The scale starts at 2**16, and halves at the first step, whose gradient overflows."""
    overflow = "INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:1"
    whole, job = (Job(finished_run.recipe, tmp_path / name, flags=FP16) for name in ("whole", "out"))
    result = whole.start(overflow)
    assert result.returncode == 0, result.stderr
    assert job.start(f"{overflow}+SIGTERM@{STEP}:3").returncode == EXIT_RESUMABLE
    assert job.start().returncode == 0
    assert torch.load(job.folder / "checkpoint-8" / "scaler.pt", weights_only=True)["scale"] < 2**16
    assert job.outcome() == whole.outcome()


@pytest.mark.parametrize("began", ["python", "accelerate"])
def test_a_run_resumes_its_random_numbers_under_another_launcher(
    finished_run: FinishedRun, unbroken: Unbroken, tmp_path: Path, began: str
) -> None:
    """The Trainer (5.23) saves the GPU's random state in another form under each launcher."""
    launchers = [tuple(python()), tuple(accelerate("ddp", 1))]
    first, second = launchers if began == "python" else reversed(launchers)
    job = Job(finished_run.recipe, tmp_path / "out", first, FP32)
    job.start(f"SIGTERM@{STEP}:3")
    assert job.status["state"] == "resumable"
    job = replace(job, launcher=second)
    assert job.start().returncode == 0
    assert job.outcome()["weights"] == unbroken(FP32)["weights"]


@pytest.mark.parametrize(("action", "flags"), [("stop", FP32), ("skip", FP32), ("rollback", FP32), ("rollback", BF16)])
def test_a_bad_number_triggers_the_chosen_action(
    finished_run: FinishedRun, tmp_path: Path, action: str, flags: tuple[str, ...]
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=(*flags, "--on_nonfinite", action))
    result = job.start("NAN@indictune.tasks.loss:ExactLoss.__call__:5")
    assert result.returncode == (1 if action == "stop" else 0), result.stderr
    (line,) = (job.folder / "nonfinite.jsonl").read_text(encoding="utf-8").splitlines()
    assert (json.loads(line)["step"], json.loads(line)["action"]) == (3, action)


@pytest.mark.parametrize(
    "event",
    [f"{kind}@indictune.tasks.loss:ExactLoss.__call__:8" for kind in ("NAN", "INFINITE")]
    + ["INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:8"],
)
def test_a_bad_number_is_noticed_before_its_step_is_saved(
    finished_run: FinishedRun, tmp_path: Path, event: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=FP32)
    assert job.start(event).returncode == 1
    (line,) = (job.folder / "nonfinite.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["step"] == 4
    assert [path.name for path in store.checkpoints_in(job.folder)] == ["checkpoint-2"]
    assert store.damage(job.folder / "checkpoint-2") == []


def test_fp16_stops_if_every_gradient_overflows(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The loss scale starts at 2**16."""
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--fp16", "true", "--bf16", "false", "--max_steps", "40"))
    overflows = "INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:"
    result = job.start("+".join(f"{overflows}{call}" for call in range(2, 81, 2)))
    assert result.returncode == 1, result.stderr
    assert "step 17" in job.status["message"]
