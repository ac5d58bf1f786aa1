"""The best checkpoint is read at the end of a run as any is when a run goes on: whole, and written by nobody else."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from indictune.training.checkpoints import store
from tests.conftest import FinishedRun
from tests.distributed.launching import accelerate
from tests.faults.runs import Job

END = "indictune.training.exact:ExactTrainer._finalize_training:1@0"
BY_ACCURACY = ("--metric_for_best_model", "accuracy")  # which no step betters but the first


def test_one_that_is_damaged_is_named_and_the_last_weights_stay(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=BY_ACCURACY)
    result = job.start(f"FLIPPED_BEST@{END}")
    assert result.returncode == 0, result.stderr
    last, best = store.listed(job.folder)
    path = best / "model.safetensors"
    assert f"{best.name}, the best, cannot be loaded: {path} is not as it was written" in result.stderr
    assert "The model is that of the last step, 8, and not the best" in result.stderr
    assert "the best by" not in result.stderr
    found, wanted, other = (load_file(folder / path.name) for folder in (job.folder, last, best))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(other[name], wanted[name]) for name in wanted)


def test_one_in_shards_that_others_can_write_is_not_read(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("fsdp2", 2)), BY_ACCURACY)
    result = job.start(f"OPENED_BEST@{END}")
    assert result.returncode != 0, result.stderr
    best = store.listed(job.folder)[1]
    assert job.status["state"] == "user_error"
    assert job.status["message"].startswith(f"--load_best_model_at_end from {best}: ")
    assert "can be written by other users" in job.status["message"]
    assert not (job.folder / "model.safetensors").exists()
    trusting = (*BY_ACCURACY, "--trust_checkpoint", "true")
    assert Job(job.recipe, job.folder, job.launcher, trusting).start().returncode == 0
