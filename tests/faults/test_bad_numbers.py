"""A NaN or infinite loss or gradient is never saved, and does what the user has chosen."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from indictune.checkpoint import store
from indictune.models.trusted_files import ADAPTER
from tests.conftest import FinishedRun
from tests.faults.runs import EXIT_RESUMABLE, STEP, Job, best_step
from tests.ranks import test_llama
from tests.ranks.launching import accelerate, python

# Two micro-batches a step: the fifth is of the third step.
LOSS = "NAN@indictune.tasks.loss:ExactLoss.__call__:5"
GRADIENT = "INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:6"
NEVER_SAVED = ("--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false")
STEP_BY_STEP = ("--save_steps", "1", "--eval_steps", "1", "--logging_steps", "1", "--save_total_limit", "20")


def noted(job: Job) -> list[dict[str, Any]]:
    lines = (job.folder / "nonfinite.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def stopped_at_step_3(job: Job) -> dict[str, Any]:
    """What a run has noted that was stopped by that step, and has saved no later one."""
    message = job.status["message"]
    assert message.startswith("The loss or the gradient of step 3 is NaN or infinite. Training has stopped")
    assert [store.step_of(path) for path in store.checkpoints_in(job.folder)] == [2]
    assert store.damage(job.folder / "checkpoint-2") == []
    (entry,) = noted(job)
    assert (entry["step"], entry["action"], len(entry["rows"])) == (3, "stop", 8)
    return entry


def weights(job: Job, step: int, file: str = "model.safetensors") -> str:
    return hashlib.sha256((job.folder / f"checkpoint-{step}" / file).read_bytes()).hexdigest()


@pytest.mark.parametrize("event", [LOSS, GRADIENT])
def test_it_stops_the_run_and_names_the_rows(finished_run: FinishedRun, tmp_path: Path, event: str) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    result = job.start(event)
    assert result.returncode == 1
    assert job.status["state"] == "failed"
    message = job.status["message"]
    entry = stopped_at_step_3(job)
    assert f"{', '.join(entry['places'][:5])} and 3 more (nonfinite.jsonl lists them)." in message
    assert "--on_nonfinite skip or rollback leaves such steps out." in message
    assert all(place.rpartition(":")[0].endswith("train.jsonl") for place in entry["places"])


# A gradient's norm is a tensor under DDP, one that is spread over the ranks under FSDP2, and a float under DeepSpeed.
# Two ranks that share rows compute two micro-batches a step.
@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        ("zero3", 3),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "zero2")),
        *(pytest.param(name, 5, marks=pytest.mark.slow) for name in ("pipeline", "tp", "zero2_tp")),
    ],
)
def test_a_gradient_that_one_rank_spoils_stops_all(
    finished_run: FinishedRun, tmp_path: Path, strategy: str, call: int
) -> None:
    """Its loss is finite."""
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)))
    result = job.start(f"INFINITE_GRADIENT@indictune.tasks.loss:ExactLoss.__call__:{call}@1")
    assert result.returncode == 1, result.stderr
    assert 0.5 < stopped_at_step_3(job)["loss"] < 2


@pytest.mark.parametrize(
    ("action", "event"),
    [
        pytest.param("skip", LOSS, marks=pytest.mark.more),
        pytest.param("rollback", GRADIENT, marks=pytest.mark.more),
        pytest.param("skip", GRADIENT, marks=pytest.mark.slow),
        pytest.param("rollback", LOSS, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_left_out_changes_no_weight(
    finished_run: FinishedRun, tmp_path: Path, action: str, event: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=(*STEP_BY_STEP, "--on_nonfinite", action))
    result = job.start(event)
    assert result.returncode == 0, result.stderr
    assert weights(job, 3) == weights(job, 2)
    assert len({weights(job, step) for step in (1, 2, 4, 5, 6, 7, 8)}) == 7
    (entry,) = noted(job)
    assert (entry["step"], entry["action"]) == (3, action)
    rows = f"{', '.join(entry['places'][:5])} and 3 more (nonfinite.jsonl lists them)\n"
    details = f"its loss was {float(entry['loss']):.4g}; its rows: {rows}"
    assert f"warning: the loss or the gradient of step 3 is NaN or infinite: {action}; {details}" in result.stderr
    lines = (job.folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in lines]
    assert [isinstance(loss, float) for loss in losses] == [step != 3 or event == GRADIENT for step in range(1, 9)]
    assert losses[2] == entry["loss"]
    assert losses[2] == "nan" or event == GRADIENT


@pytest.mark.slow
def test_a_record_that_the_disk_does_not_take_ends_no_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--on_nonfinite", "skip"))
    result = job.start(f"{LOSS}+ENOSPC@indictune.files:json_line:1")
    assert result.returncode == 0, result.stderr
    record = job.folder / "nonfinite.jsonl"
    assert f"warning: {record} cannot be written: No space left on device. The run continues." in result.stderr
    assert (
        "warning: the loss or the gradient of step 3 is NaN or infinite: skip; its loss was nan; its rows: "
        in result.stderr
    )


def stopped_after(job: Job, step: int) -> None:
    """Make a finished run one that was killed after the checkpoint of this step."""
    (job.folder / "metrics.json").unlink()
    for path in store.checkpoints_in(job.folder):
        if store.step_of(path) > step:
            shutil.rmtree(path)


@pytest.mark.slow
def test_a_run_that_goes_on_counts_on_and_notes_again_what_it_stopped_at_alone(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    flags = ("--save_total_limit", "20", "--on_nonfinite", "skip")
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start(LOSS).returncode == 0
    stopped_after(job, 4)
    at_step_5 = "NAN@indictune.tasks.loss:ExactLoss.__call__:1"
    limited = replace(job, flags=(*flags, "--max_nonfinite_steps", "1"))
    assert limited.start(at_step_5).returncode == 1
    assert "step 5 is NaN or infinite. 1 such steps were left out before, and " in job.status["message"]
    assert "--max_nonfinite_steps is 1." in job.status["message"]
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(3, "skip"), (5, "stop")]
    assert limited.start(at_step_5).returncode == 1  # again, as `--max-restarts` would
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(3, "skip"), (5, "stop")]
    named = ("--resume_from_checkpoint", str(job.folder / "checkpoint-4"), "--trust_checkpoint", "true")
    elsewhere = replace(limited, folder=tmp_path / "elsewhere", flags=(*limited.flags, *named))
    assert elsewhere.start(at_step_5).returncode == 1  # where there is no record of step 3
    assert "1 such steps were left out before, and --max_nonfinite_steps is 1." in elsewhere.status["message"]
    assert replace(job, flags=(*flags, "--max_nonfinite_steps", "2")).start(at_step_5).returncode == 0
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(3, "skip"), (5, "skip")]


@pytest.fixture(scope="module")
def saved_run(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """With checkpoints of steps 2 and 4."""
    job = Job(finished_run.recipe, tmp_path_factory.mktemp("saved") / "out", flags=("--save_total_limit", "20"))
    assert job.start().returncode == 0
    stopped_after(job, 4)
    return job


def rolled_back_at_step_5(saved_run: Job, folder: Path, fault: str) -> tuple[Job, int, str]:
    """Go on from step 4, whose checkpoint is spoilt meanwhile: the run, its exit code and what it said."""
    flags = ("--on_nonfinite", "rollback", "--save_strategy", "no", "--load_best_model_at_end", "false")
    job = replace(saved_run, folder=shutil.copytree(saved_run.folder, folder), flags=flags)
    in_training = f"{fault}@indictune.training.exact_trainer:ExactTrainer.training_step:1"
    result = job.start(f"{in_training}+NAN@indictune.tasks.loss:ExactLoss.__call__:1")
    return job, result.returncode, result.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_rolled_back_to(saved_run: Job, tmp_path: Path) -> None:
    job, code, said = rolled_back_at_step_5(saved_run, tmp_path / "out", "FLIPPED")
    assert code == 0, said
    assert f"{job.folder / 'checkpoint-4' / 'optimizer.pt'} is not as it was written" in said
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(5, "rollback")]


@pytest.mark.slow
def test_the_newest_is_rolled_back_to_where_the_best_is_damaged(finished_run: FinishedRun, tmp_path: Path) -> None:
    first_is_best = ("--eval_delay", "3", "--metric_for_best_model", "loss", "--learning_rate", "0.001")
    flags = (*STEP_BY_STEP, "--on_nonfinite", "rollback", *first_is_best)
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    at_step_5 = "FLIPPED_BEST@indictune.training.exact_trainer:ExactTrainer.training_step:9"
    job.start(f"{at_step_5}+NAN@indictune.tasks.loss:ExactLoss.__call__:9")
    assert [best_step(job.folder / f"checkpoint-{step}") for step in (2, 4)] == [None, 3]
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(5, "rollback")]
    assert weights(job, 5) == weights(job, 4)


@pytest.mark.more
def test_a_checkpoint_that_others_can_write_is_not_rolled_back_to(saved_run: Job, tmp_path: Path) -> None:
    job, code, said = rolled_back_at_step_5(saved_run, tmp_path / "out", "OPENED")
    assert code == 2, said
    assert job.status["message"].startswith(f"--on_nonfinite rollback to {job.folder / 'checkpoint-4'}: ")
    assert "can be written by other users" in job.status["message"]


def test_more_than_the_limit_ends_the_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--on_nonfinite", "skip", "--max_nonfinite_steps", "0"))
    assert job.start(LOSS).returncode == 1
    assert "0 such steps were left out before, and --max_nonfinite_steps is 0." in job.status["message"]
    assert "--on_nonfinite" not in job.status["message"]  # which was given


@pytest.mark.more
@pytest.mark.parametrize("saved", [(), ("--save_strategy", "steps", "--save_steps", "1")])
def test_weights_that_the_last_step_spoils_are_no_model_and_no_checkpoint(
    finished_run: FinishedRun, tmp_path: Path, saved: tuple[str, ...]
) -> None:
    flags = ("--learning_rate", "1e39", "--max_steps", "1", *NEVER_SAVED, *saved)
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start().returncode == 1
    assert job.status["message"].startswith("A weight is NaN or infinite after step 1. Training has stopped")
    (entry,) = noted(job)
    assert (entry["step"], entry["action"], entry["loss"]) == (1, "stop", None)
    assert f"The rows of the step were {entry['places'][0]}, " in job.status["message"]
    assert not list(job.folder.rglob("*.safetensors"))


@pytest.mark.more
@pytest.mark.parametrize("stopped", [False, True])
def test_without_a_checkpoint_there_is_nothing_to_roll_back_to(
    finished_run: FinishedRun, tmp_path: Path, stopped: bool
) -> None:
    """Nor with that of a stop alone, which the run would not have if it had not been stopped."""
    flags = ("--on_nonfinite", "rollback", "--save_steps", "4", "--eval_steps", "4")
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    if stopped:
        assert job.start(f"SIGTERM@{STEP}:1").returncode == EXIT_RESUMABLE
    assert job.start("NAN@indictune.tasks.loss:ExactLoss.__call__:1" if stopped else LOSS).returncode == 1
    assert job.status["message"].endswith("[no-checkpoint-to-roll-back-to]")


@pytest.mark.slow
def test_the_learning_rate_is_not_rolled_back(finished_run: FinishedRun, tmp_path: Path) -> None:
    """This schedule lowers the rate that the optimizer has; its states, of step 4, have that of before step 6."""
    settings = {"factor": 0.5, "patience": 0, "threshold": 1}  # nothing is good enough
    schedule = ("--lr_scheduler_type", "reduce_lr_on_plateau", "--lr_scheduler_kwargs", json.dumps(settings))
    steps = ("--logging_steps", "1", "--save_steps", "4", "--eval_steps", "2")
    flags = (*schedule, *steps, "--on_nonfinite", "rollback")
    whole, job = (Job(finished_run.recipe, tmp_path / name, flags=flags) for name in ("whole", "out"))
    assert whole.start().returncode == 0
    result = job.start("NAN@indictune.tasks.loss:ExactLoss.__call__:13")  # of two micro-batches a step
    assert result.returncode == 0, result.stderr
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(7, "rollback")]
    rates, as_planned = (
        [entry["learning_rate"] for entry in map(json.loads, lines) if "learning_rate" in entry]
        for lines in ((each.folder / "train_log.jsonl").read_text().splitlines() for each in (job, whole))
    )
    assert len(rates) == 8
    assert rates == as_planned
    assert rates[-1] < rates[4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "call", "saves"),
    [
        (tuple(python()), 13, ("--save_steps", "4", "--save_total_limit", "1")),  # of two micro-batches a step
        pytest.param(tuple(python()), 13, ("--save_strategy", "epoch"), marks=pytest.mark.slow),  # of 4 steps
        pytest.param(tuple(accelerate("fsdp2", 2)), 7, ("--save_steps", "4"), marks=pytest.mark.slow),
    ],
    ids=["steps", "epochs", "fsdp2"],
)
def test_a_checkpoint_of_a_stop_is_not_rolled_back_to(
    finished_run: FinishedRun, tmp_path: Path, launcher: tuple[str, ...], call: int, saves: tuple[str, ...]
) -> None:
    """That of step 6, when step 7 is bad: the run would not have it if it had not been stopped."""
    flags = ("--on_nonfinite", "rollback", "--eval_strategy", "no", "--load_best_model_at_end", "false", *saves)
    whole, job = (Job(finished_run.recipe, tmp_path / name, launcher, flags) for name in ("whole", "out"))
    at_step_7 = "NAN@indictune.tasks.loss:ExactLoss.__call__:"
    result = whole.start(f"{at_step_7}{call}")
    assert result.returncode == 0, result.stderr
    assert job.start(f"SIGTERM@{STEP}:5").returncode != 0
    assert job.status["state"] == "resumable"
    assert [store.step_of(path) for path in store.checkpoints_in(job.folder)] == [6, 4]
    result = job.start(f"{at_step_7}1")
    assert result.returncode == 0, result.stderr
    assert noted(job) == noted(whole)
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(7, "rollback")]
    assert job.outcome() == whole.outcome()


@pytest.mark.more
@pytest.mark.parametrize(
    ("launcher", "micro_batches", "policy"),
    [
        (tuple(python()), 2, "skip"),
        pytest.param(tuple(python()), 2, "stop", marks=pytest.mark.slow),
        pytest.param(tuple(accelerate("fsdp2", 2)), 1, "stop", marks=pytest.mark.slow),
    ],
)
def test_fp16_whose_every_gradient_overflows_ends_the_run(
    finished_run: FinishedRun, tmp_path: Path, launcher: tuple[str, ...], micro_batches: int, policy: str
) -> None:
    """At the seventeenth step: the scale of the loss begins at 2**16."""
    flags = ("--fp16", "true", "--max_steps", "20", "--save_steps", "10", "--eval_steps", "10")
    job = Job(finished_run.recipe, tmp_path / "out", launcher, (*flags, "--on_nonfinite", policy))
    overflows = "INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:"
    event = "+".join(f"{overflows}{step * micro_batches}" for step in range(1, 21))
    assert job.start(event, script="tests/faults/scaling.py").returncode == 1
    (entry,) = noted(job)
    assert (entry["step"], entry["action"]) == (17, "stop")
    assert entry["loss"] > 0.5  # that it had
    message, rows = job.status["message"], ", ".join(entry["places"][:5])
    assert f"at step 17 the gradient was infinite even with a scale of 1. The loss was {entry['loss']:.4g}" in message
    assert f", the rows {rows} and 3 more (nonfinite.jsonl lists them)." in message
    assert message.endswith("[no-loss-scale]")
    assert [store.step_of(path) for path in store.checkpoints_in(job.folder)] == [10]


def tensors(found: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All in nested dictionaries and lists, by their places there."""
    if isinstance(found, torch.Tensor):
        return {name: found}
    inner = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return {place: tensor for key, each in inner for place, tensor in tensors(each, f"{name}/{key}").items()}


def weights_and_states(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but random numbers, by file and place: of weights and of the optimizer's states."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix == ".safetensors":
            found |= tensors(load_file(path), path.name)
        elif path.name == ".metadata":  # FSDP2's, of a folder of shards
            dcp_to_torch_save(path.parent, scratch)
            found |= tensors(torch.load(scratch, weights_only=True), path.parent.name)
        elif path.name == "optimizer.pt" or path.name.endswith("_states.pt"):
            found |= tensors(torch.load(path, weights_only=False), path.name)
    return found


def assert_step_4_is_taken_back(job: Job, scratch: Path, action: str = "rollback") -> None:
    """It is bad, and what is saved after it, with which step 5 begins, is what was saved before: after step 2 where
    step 3 is rolled back too, else after step 3."""
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(4, action)]
    steps = (2 if action == "rollback" else 3, 4)
    before, after = (weights_and_states(job.folder / f"checkpoint-{step}", scratch / "whole.pt") for step in steps)
    assert any("exp_avg_sq" in name for name in before)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_steps_since_the_checkpoint_are_taken_back(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--on_nonfinite", "rollback", "--save_total_limit", "20"))
    result = job.start("NAN@indictune.tasks.loss:ExactLoss.__call__:8")  # of two micro-batches a step
    assert result.returncode == 0, result.stderr
    assert_step_4_is_taken_back(job, tmp_path)


@pytest.mark.slow
def test_the_steps_of_an_adapter_of_a_llama_are_taken_back(tmp_path: Path) -> None:
    flags = (*test_llama.METHODS["lora"], "--on_nonfinite", "rollback", "--max_steps", "4")
    job = Job(test_llama.write_job(tmp_path), tmp_path / "out", flags=flags)
    at_step_4 = (
        "INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:16"  # of four micro-batches
    )
    result = job.start(at_step_4, test_llama.SCRIPT)
    assert result.returncode == 0, result.stderr
    assert_step_4_is_taken_back(job, tmp_path)


# On each rank a step has one micro-batch of 4 rows, or two of 2, of which the first is bad.
@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "action", "rows"),
    [
        ("fsdp2", "rollback", 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("fsdp2", "skip", 4), ("fsdp2", "rollback", 2)),
                *(("ddp", "skip", 4), ("ddp", "rollback", 4), ("ddp", "skip", 2)),
                *(("zero2", "rollback", 4), ("zero3", "rollback", 4)),
            )
        ),
    ],
)
def test_all_ranks_leave_a_step_out_that_one_has_seen(
    finished_run: FinishedRun, tmp_path: Path, strategy: str, action: str, rows: int
) -> None:
    every = "2" if action == "rollback" else "1"
    saves = ("--save_steps", every, "--eval_steps", every, "--save_total_limit", "20")
    flags = ("--on_nonfinite", action, "--per_device_train_batch_size", str(rows), *saves)
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)), flags)
    result = job.start(f"NAN@indictune.tasks.loss:ExactLoss.__call__:{3 * 4 // rows + 1}@1")
    assert result.returncode == 0, result.stderr
    assert [entry["loss"] for entry in noted(job)] == ["nan"]  # of both, and rank 0 writes
    assert_step_4_is_taken_back(job, tmp_path, action)


@pytest.mark.more
@pytest.mark.parametrize(
    ("launcher", "call", "rank"),
    [
        (tuple(python()), 8, ""),  # of two micro-batches a step
        pytest.param(tuple(accelerate("ddp", 2)), 4, "@1", marks=pytest.mark.slow),
        pytest.param(tuple(accelerate("fsdp2", 2)), 4, "@1", marks=pytest.mark.slow),
    ],
    ids=["one process", "ddp", "fsdp2"],
)
def test_a_request_to_stop_in_a_step_that_is_rolled_back_stops_the_run_after_it(
    finished_run: FinishedRun, tmp_path: Path, launcher: tuple[str, ...], call: int, rank: str
) -> None:
    whole, job = (
        Job(finished_run.recipe, tmp_path / name, launcher, ("--on_nonfinite", "rollback"))
        for name in ("whole", "out")
    )
    place = f"indictune.tasks.loss:ExactLoss.__call__:{call}"
    assert whole.start(f"NAN@{place}").returncode == 0
    result = job.start(f"NAN@{place}+SIGTERM@{place}{rank}")
    assert result.returncode == (1 if rank else EXIT_RESUMABLE), result.stderr
    assert job.status["state"] == "resumable"
    assert job.status["message"].startswith("stopped after step 4, which is saved.")
    assert store.damage(job.folder / "checkpoint-4") == []
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(4, "rollback")]
    assert job.start().returncode == 0
    assert noted(job) == noted(whole)
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
def test_a_checkpoint_that_is_still_being_written_is_rolled_back_to(finished_run: FinishedRun, tmp_path: Path) -> None:
    """That of step 4, when step 6 is bad."""
    unevaluated = ("--eval_strategy", "no", "--load_best_model_at_end", "false")
    flags = ("--on_nonfinite", "rollback", "--save_total_limit", "20", "--async_save", "true", *unevaluated)
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("fsdp2", 2)), flags)
    slow = "SLOW@indictune.checkpoint.model_state:write_shards:2"
    result = job.start(f"{slow}+NAN@indictune.tasks.loss:ExactLoss.__call__:6")
    assert result.returncode == 0, result.stderr
    assert [(entry["step"], entry["action"]) for entry in noted(job)] == [(6, "rollback")]
    before, after = (weights_and_states(job.folder / f"checkpoint-{step}", tmp_path / "whole.pt") for step in (4, 6))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_deepspeed_takes_an_adapter_back(finished_run: FinishedRun, tmp_path: Path, strategy: str) -> None:
    """Its checkpoints lack the frozen weights."""
    flags = (*STEP_BY_STEP, "--on_nonfinite", "rollback", "--method", "lora")
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)), flags)
    result = job.start("NAN@indictune.tasks.loss:ExactLoss.__call__:3@1")
    assert result.returncode == 0, result.stderr
    (entry,) = noted(job)
    assert (entry["step"], entry["action"]) == (3, "rollback")
    assert weights(job, 3, ADAPTER) == weights(job, 2, ADAPTER)
    assert len({weights(job, step, ADAPTER) for step in (1, 2, 4, 5, 6, 7, 8)}) == 7


@pytest.mark.slow
def test_deepspeed_cannot_skip(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ("--on_nonfinite", "skip")
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("zero2", 1)), flags)
    assert job.start().returncode != 0
    assert job.status["message"].startswith("--on_nonfinite skip: ")
    assert job.status["message"].endswith("[skip-under-deepspeed]")
