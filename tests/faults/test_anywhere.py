"""A run stopped after any step goes on bit for bit, however its batches are made."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from indictune.checkpoint import store
from indictune.files import RECIPE
from tests.conftest import FinishedRun
from tests.faults.runs import EXIT_RESUMABLE, STEP, Job
from tests.ranks import test_llama
from tests.ranks.launching import SCRIPT, Run, accelerate, python

BATCHES = {
    "one micro-batch": ("--per_device_train_batch_size", "8"),
    "four micro-batches": ("--per_device_train_batch_size", "2"),
    "padded": ("--padding_free", "off"),
    "a budget of tokens": ("--max_tokens_per_device", "100"),
    "two workers": ("--dataloader_num_workers", "2"),
    # The model of no step is better than that of step 2: the third that is not is step 8, of 12.
    "early stopping": ("--early_stopping_patience", "3", "--learning_rate", "0", "--num_train_epochs", "3"),
    "frequent logs": ("--logging_steps", "1"),
    "each epoch": ("--eval_strategy", "epoch", "--save_strategy", "epoch"),
    "without evaluation": ("--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"),
    "an adapter": ("--method", "lora"),
}


def _marks(number: int, step: int) -> list[pytest.MarkDecorator]:
    """`make test` stops one kind of batches after one step, `make test-more` two more; the slow tests try all."""
    if step != 1 + 2 * (number % 3) or number % 4 != 1:
        return [pytest.mark.slow]
    return [] if number == 1 else [pytest.mark.more]


STOPS = [
    pytest.param(name, step, marks=_marks(number, step)) for number, name in enumerate(BATCHES) for step in range(1, 8)
]


@pytest.fixture(scope="module")
def unbroken(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What comes out where nothing happens, by the kind of batches or the strategy, as far as it is known."""
    return {}


@pytest.mark.parametrize(("batches", "step"), STOPS)
def test_one_process(
    finished_run: FinishedRun, unbroken: dict[str, dict[str, Any]], tmp_path: Path, batches: str, step: int
) -> None:
    if batches not in unbroken:
        whole = Job(finished_run.recipe, tmp_path / "unbroken", flags=BATCHES[batches])
        result = whole.start()
        assert result.returncode == 0, result.stderr
        unbroken[batches] = ended(whole)
    job = Job(finished_run.recipe, tmp_path / "out", flags=BATCHES[batches])
    assert job.start(f"SIGTERM@{STEP}:{step}").returncode == EXIT_RESUMABLE
    saved = store.read_manifest(store.checkpoints_in(job.folder)[0])
    assert saved is not None
    assert saved.rows_of_epoch == saved.step % 4 * 8  # 30 rows an epoch
    assert saved.recipe == store.file_digest(store.checkpoints_in(job.folder)[0] / RECIPE).sha256
    go_on(job, step)
    assert ended(job) == unbroken[batches]


@pytest.mark.slow
def test_the_scale_of_the_loss_goes_on(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The scale begins at 2**16, and is halved at the first step, whose gradient overflows."""
    script, overflow = (
        "tests/faults/scaling.py",
        "INFINITE_GRADIENT@indictune.training.exact_trainer:ExactTrainer.training_step:1",
    )
    whole, job = (Job(finished_run.recipe, tmp_path / name, flags=("--fp16", "true")) for name in ("whole", "out"))
    result = whole.start(overflow, script)
    assert result.returncode == 0, result.stderr
    assert job.start(f"{overflow}+SIGTERM@{STEP}:3", script).returncode == EXIT_RESUMABLE
    go_on(job, 3, script)
    assert torch.load(job.folder / "checkpoint-8" / "scaler.pt", weights_only=True)["scale"] == 2**15
    assert job.outcome() == whole.outcome()


def go_on(job: Job, step: int, script: str = SCRIPT) -> None:
    """To the end, from where the run has stopped, at this step or the next: begun afresh, it would end alike."""
    saved = store.checkpoints_in(job.folder)[0]
    assert store.step_of(saved) in (step, step + 1)
    result = job.start(script=script)
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {saved}\n" in result.stderr


def ended(job: Job) -> dict[str, Any]:
    """The outcome, but for checkpoints where a run saves none by itself."""
    return job.outcome(with_checkpoint=("--save_strategy", "no") not in pairwise(job.flags))


# After two steps, in the middle of an epoch; the slow tests try all. DDP goes on in `test_a_request_to_one_rank_...`.
MARKS: dict[tuple[str, int], list[pytest.MarkDecorator]] = {
    ("fsdp2", 3): [pytest.mark.more],
}
ALL = [
    (strategy, step)
    for strategy in ("ddp", "fsdp2", "zero2", "zero2_offload", "zero3_offload")
    for step in range(1, 8)
]


@pytest.mark.parametrize(
    ("strategy", "step"), [pytest.param(*each, marks=MARKS.get(each, [pytest.mark.slow])) for each in ALL]
)
def test_two_processes(
    finished_run: FinishedRun, unbroken: dict[str, dict[str, Any]], tmp_path: Path, strategy: str, step: int
) -> None:
    if strategy not in unbroken:
        whole = Job(finished_run.recipe, tmp_path / "unbroken", tuple(accelerate(strategy, 2)))
        result = whole.start()
        assert result.returncode == 0, result.stderr
        unbroken[strategy] = whole.outcome()
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)))
    assert job.start(f"SIGTERM@{STEP}:{step}").returncode != 0
    assert job.status["state"] == "resumable"
    go_on(job, step)
    assert job.outcome() == unbroken[strategy]


@pytest.mark.slow
def test_three_processes(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The sum of three numbers depends on their order, and that on where a gradient stands in what is sent."""
    flags = ("--global_batch_size", "12", "--per_device_train_batch_size", "4")
    whole, job = (Job(finished_run.recipe, tmp_path / name, tuple(accelerate("ddp", 3)), flags) for name in "wj")
    result = whole.start()
    assert result.returncode == 0, result.stderr
    assert job.start(f"SIGTERM@{STEP}:3").returncode != 0
    assert job.status["state"] == "resumable"
    go_on(job, 3)
    assert job.outcome() == whole.outcome()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_llama_on_three_processes(tmp_path: Path, method: str) -> None:
    """With activations that are computed again, and several micro-batches a step."""
    recipe = test_llama.write_job(tmp_path)
    flags = (*test_llama.METHODS[method], "--global_batch_size", "12", "--per_device_train_batch_size", "2")
    whole, job = (Job(recipe, tmp_path / name, tuple(accelerate("ddp", 3)), flags) for name in "wj")
    result = whole.start(script=test_llama.SCRIPT)
    assert result.returncode == 0, result.stderr
    assert job.start(f"SIGTERM@{STEP}:3", test_llama.SCRIPT).returncode != 0
    assert job.status["state"] == "resumable"
    go_on(job, 3, test_llama.SCRIPT)
    assert job.outcome() == whole.outcome()


@pytest.mark.more
@pytest.mark.parametrize(
    ("launcher", "step"),
    [
        pytest.param(launcher, step, marks=[] if (launcher, step) == ("python", 5) else pytest.mark.slow)
        for launcher in ("python", "fsdp2")
        for step in (1, 3, 5)
    ],
)
def test_a_llama_on_packed_rows(unbroken: dict[str, dict[str, Any]], tmp_path: Path, launcher: str, step: int) -> None:
    """The 24 chats are 15 packs, so that an epoch has four steps, and step 5 is in the second."""
    command = tuple(python() if launcher == "python" else accelerate(launcher, 2))
    recipe, chats = test_llama.write_job(tmp_path), tmp_path / "train.jsonl"
    chats.write_text("".join(chats.read_text(encoding="utf-8").splitlines(keepends=True)[:24]), encoding="utf-8")
    sizes = ("--global_batch_size", "4", "--per_device_train_batch_size", "2")
    flags = (*test_llama.METHODS["full"], "--packing", "true", *sizes)
    if f"packed, {launcher}" not in unbroken:
        whole = Job(recipe, tmp_path / "unbroken", command, flags)
        result = whole.start(script=test_llama.SCRIPT)
        assert result.returncode == 0, result.stderr
        unbroken[f"packed, {launcher}"] = whole.outcome()
    job = Job(recipe, tmp_path / "out", command, flags)
    assert job.start(f"SIGTERM@{STEP}:{step}", test_llama.SCRIPT).returncode != 0
    assert job.status["state"] == "resumable"
    go_on(job, step, test_llama.SCRIPT)
    assert job.outcome() == unbroken[f"packed, {launcher}"]
    assert Run(job.folder).series("epoch") == [0.75, 1.5]  # logged at steps 3 and 6
