"""The best checkpoint is one that the run saves by itself, wherever it is stopped; and it is read at the run's end as
any is when a run goes on: whole, and written by nobody else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from indictune.checkpoint import store
from indictune.checkpoint.save import planned_checkpoints
from tests.conftest import FinishedRun
from tests.faults.runs import EXIT_RESUMABLE, STEP, Job
from tests.ranks.launching import accelerate

END = "indictune.training.exact_trainer:ExactTrainer.load_best:1@0"
BY_ACCURACY = ("--metric_for_best_model", "accuracy")  # which no step betters but the first
EVERY_THIRD = (*BY_ACCURACY, "--eval_steps", "1", "--save_steps", "3")
ONE_BATCH = ("--per_device_eval_batch_size", "16")  # in which no stop is heard


def best_of(job: Job) -> tuple[list[str], str | None, int | None]:
    """The checkpoints of a run, and which its last one names, by its name and its step."""
    found = store.checkpoints_in(job.folder)
    state = json.loads((found[0] / "trainer_state.json").read_text(encoding="utf-8"))
    named = state["best_model_checkpoint"]
    return [each.name for each in found], named and Path(named).name, state["best_global_step"]


@pytest.fixture(scope="module")
def unbroken(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run whose best evaluation is of a step that is not saved."""
    job = Job(finished_run.recipe, tmp_path_factory.mktemp("unbroken") / "out", flags=EVERY_THIRD)
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert "The model is that of checkpoint-3, the best by accuracy" in result.stderr
    return job


def test_it_is_the_best_of_those_that_were_saved(unbroken: Job) -> None:
    history = unbroken.outcome()["history"]
    evaluated = {entry["step"]: entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry}
    assert max(evaluated.values()) == evaluated[1] == evaluated[3]
    assert best_of(unbroken) == (["checkpoint-8", "checkpoint-3"], "checkpoint-3", 3)


@pytest.mark.slow
def test_it_may_be_that_of_the_last_step_which_every_run_saves(unbroken: Job, tmp_path: Path) -> None:
    job = replace(unbroken, folder=tmp_path / "out", flags=(*EVERY_THIRD, "--eval_delay", "8"))
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert "The model is that of checkpoint-8, the best by accuracy" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "is_due"), [((), True), (ONE_BATCH, False)], ids=["before it", "after it"])
def test_a_step_that_is_saved_because_of_a_stop_is_not_the_best(
    unbroken: Job, tmp_path: Path, flags: tuple[str, ...], is_due: bool
) -> None:
    """The one is evaluated when the run goes on, the other before it is saved."""
    job = replace(unbroken, folder=tmp_path / "out", flags=(*EVERY_THIRD, *flags))
    assert job.start(f"SIGTERM@{STEP}:1").returncode == EXIT_RESUMABLE
    assert best_of(job) == (["checkpoint-1"], None, None)
    manifest = store.read_manifest(job.folder / "checkpoint-1")
    assert manifest is not None
    assert (manifest.evaluation_due, manifest.planned) == (is_due, False)
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert best_of(job) == best_of(unbroken)
    found, wanted = job.outcome(), unbroken.outcome()
    assert [found[name] for name in ("weights", "states")] == [wanted[name] for name in ("weights", "states")]


@pytest.mark.more
def test_a_run_that_saves_the_best_alone_stops_where_it_is_none(unbroken: Job, tmp_path: Path) -> None:
    flags = (*EVERY_THIRD, *ONE_BATCH, "--save_strategy", "best", "--save_total_limit", "1")
    whole, job = (replace(unbroken, folder=tmp_path / name, flags=flags) for name in ("whole", "out"))
    assert whole.start().returncode == 0
    assert job.start(f"SIGTERM@{STEP}:5").returncode == EXIT_RESUMABLE
    assert best_of(job) == (["checkpoint-5", "checkpoint-1"], "checkpoint-1", 1)
    assert planned_checkpoints(job.folder) == [job.folder / "checkpoint-1"]
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert "The model is that of checkpoint-1, the best by accuracy" in result.stderr
    assert job.outcome(with_checkpoint=False) == whole.outcome(with_checkpoint=False)


@pytest.mark.slow
def test_a_run_that_ends_with_the_last_weights_compares_all_and_one_that_goes_on_with_it_need_not(
    unbroken: Job, tmp_path: Path
) -> None:
    """The one that goes on is to end with the best: else no checkpoint of it would ever be better than step 1."""
    last = ("--load_best_model_at_end", "false")
    job = replace(unbroken, folder=tmp_path / "out", flags=(*EVERY_THIRD, *last))
    assert job.start(f"SIGTERM@{STEP}:5").returncode == EXIT_RESUMABLE
    assert best_of(job) == (["checkpoint-5", "checkpoint-3"], None, 1)
    result = replace(job, flags=EVERY_THIRD).start()
    assert result.returncode == 0, result.stderr
    assert "The model is that of checkpoint-6, the best by accuracy" in result.stderr


@pytest.mark.more
def test_a_model_of_the_last_weights_is_not_reported_as_the_best(unbroken: Job, tmp_path: Path) -> None:
    flags = (*EVERY_THIRD, "--eval_steps", "3", "--load_best_model_at_end", "false")
    job = replace(unbroken, folder=tmp_path / "out", flags=flags)
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert best_of(job) == (["checkpoint-8", "checkpoint-3"], "checkpoint-3", 3)
    assert "The model is that of" not in result.stderr
    found, wanted = (load_file(folder / "model.safetensors") for folder in (job.folder, job.folder / "checkpoint-8"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.more
def test_one_that_is_damaged_is_named_and_the_last_weights_stay(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=BY_ACCURACY)
    result = job.start(f"FLIPPED_BEST@{END}")
    assert result.returncode == 0, result.stderr
    last, best = store.checkpoints_in(job.folder)
    path = best / "model.safetensors"
    assert f"{best.name}, the best, cannot be loaded: {path} is not as it was written" in result.stderr
    assert "The model is that of the last step, 8, and not the best" in result.stderr
    assert "the best by" not in result.stderr
    found, wanted, other = (load_file(folder / path.name) for folder in (job.folder, last, best))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not all(torch.equal(other[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_one_in_shards_that_others_can_write_is_not_read(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("fsdp2", 2)), BY_ACCURACY)
    result = job.start(f"OPENED_BEST@{END}")
    assert result.returncode != 0, result.stderr
    best = store.checkpoints_in(job.folder)[1]
    assert job.status["state"] == "user_error"
    assert job.status["message"].startswith(f"--load_best_model_at_end from {best}: ")
    assert "can be written by other users" in job.status["message"]
    assert not (job.folder / "model.safetensors").exists()
    trusting = (*BY_ACCURACY, "--trust_checkpoint", "true")
    assert Job(job.recipe, job.folder, job.launcher, trusting).start().returncode == 0
