"""A run that goes on from a checkpoint ends as the run that was never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launching import Run, accelerate, distance, python, train

Start = Callable[..., Run]

STOPPED_AT = 7  # in the second epoch, which begins after step 5


def stopped_copy(whole: Run, folder: Path, stopped_at: int = STOPPED_AT) -> Path:
    """A copy of a run as it was after the step at which it stopped. Each step has its checkpoint."""
    shutil.copytree(whole.folder, folder)
    for step in range(stopped_at + 1, len(whole.log) + 1):
        shutil.rmtree(folder / f"checkpoint-{step}")
    for name in ("metrics.json", "model.safetensors"):
        (folder / name).unlink()
    return folder


@pytest.mark.more
def test_auto_goes_on_from_the_newest_checkpoint(run_under: Start, job: Path, tmp_path: Path) -> None:
    flags = ("--per_device_train_batch_size", "24")
    whole = run_under("single", 1, *flags)
    stopped = stopped_copy(whole, tmp_path / "run")

    resumed = train(python(), stopped, "--config", str(job), *flags, "--resume_from_checkpoint", "auto")

    assert [entry["step"] for entry in resumed.log] == list(range(1, 13))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert resumed.series(name) == pytest.approx(whole.series(name), rel=1e-6)
    assert distance(resumed.weights, whole.weights) <= 1e-6 * distance(whole.weights, whole.weights_at(1))
    assert resumed.metrics["eval"]["loss"] == pytest.approx(whole.metrics["eval"]["loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("single", 1), ("tp", 2)),
        (("tp", 2), ("single", 1)),
        (("tp", 2), ("fsdp2_tp", 4)),
        (("fsdp2_tp", 4), ("fsdp2", 2)),
        (("ddp_tp", 4), ("ddp", 2)),
    ],
)
def test_split_matrices_go_on_under_another_strategy(
    run_under: Start, job: Path, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    whole = run_under(*before)
    folder = stopped_copy(whole, tmp_path / "run")

    launcher = python() if after[0] == "single" else accelerate(*after)
    resumed = train(launcher, folder, "--config", str(job), "--resume_from_checkpoint", "auto")

    assert [entry["step"] for entry in resumed.log] == list(range(1, 13))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert resumed.series(name) == pytest.approx(whole.series(name), rel=1e-4)
    assert distance(resumed.weights, whole.weights) <= 1e-3 * distance(whole.weights, whole.weights_at(1))
