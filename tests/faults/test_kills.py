"""A run that is killed at any time, or finds a shard damaged, ends as one that nothing happened to."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from indictune.checkpoint import store
from tests.conftest import FinishedRun
from tests.faults.faulty import spoil
from tests.faults.runs import SAVE, STEP, Job
from tests.ranks.launching import accelerate

KILLS = 3
LONG = ("--num_train_epochs", "4", "--save_total_limit", "9")


def test_a_run_that_is_killed_at_random_times_ends_as_if_it_was_not(finished_run: FinishedRun, tmp_path: Path) -> None:
    unbroken, job = (Job(finished_run.recipe, tmp_path / name, flags=LONG) for name in ("unbroken", "out"))
    since = time.time()
    assert unbroken.start().returncode == 0
    saved = [(each / store.MANIFEST).stat().st_mtime - since for each in store.checkpoints_in(unbroken.folder)]
    step = random.randint(3, 15)  # when there is a checkpoint, so that one is gone on from whatever the times are
    kills = [f"{STEP}:{step}", *(f"after:{random.uniform(min(saved), max(saved)):.3f}" for _ in range(KILLS - 1))]
    print("killed at", kills)
    assert job.start(f"SIGKILL@{kills[0]}").returncode == -9
    said = ""
    for kill in kills[1:]:  # a run that goes on may have ended by then
        result = job.start(f"SIGKILL@{kill}")
        assert result.returncode in (-9, 0)
        said += result.stderr
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {job.folder / store.PREFIX}" in said + result.stderr
    assert job.outcome() == unbroken.outcome()


@pytest.mark.slow
def test_a_run_that_is_killed_while_its_model_moves_to_its_place_moves_all_of_it(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    unbroken, job = (Job(finished_run.recipe, tmp_path / name) for name in ("unbroken", "out"))
    assert unbroken.start().returncode == 0
    model = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training_args.bin"}
    for count in (0, 2):
        # Each file is written through just before it moves, weights last.
        assert job.start(f"SIGKILL@indictune.training.finish:write_through:{count + 1}").returncode == -9
        moved = {name for name in model if (job.folder / name).exists()}
        assert len(moved) == count
        assert {path.name for path in (job.folder / store.UNFINISHED_MODEL).iterdir()} == model - moved
    for name in moved:  # what is in its place comes again, with the rest
        (job.folder / name).write_text("{")
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert job.outcome() == unbroken.outcome()
    names = [
        {path.name for path in folder.iterdir() if path.name[0] != "."} for folder in (job.folder, unbroken.folder)
    ]
    assert names[0] == names[1]
    for name in model - {"training_args.bin"}:  # which names the folder
        assert (job.folder / name).read_bytes() == (unbroken.folder / name).read_bytes()
    assert not (job.folder / store.UNFINISHED_MODEL).exists()


@pytest.mark.more
@pytest.mark.parametrize(("place", "newest"), [pytest.param(f"{STEP}:5", 4, marks=pytest.mark.slow), (f"{SAVE}:2", 2)])
def test_a_run_of_zero3_whose_rank_is_killed_ends_as_if_it_was_not(
    finished_run: FinishedRun, tmp_path: Path, place: str, newest: int
) -> None:
    unbroken, job = (Job(finished_run.recipe, tmp_path / name, tuple(accelerate("zero3", 2))) for name in ("u", "out"))
    assert unbroken.start().returncode == 0
    assert job.start(f"SIGKILL@{place}@1").returncode != 0
    found = store.checkpoints_in(job.folder)
    assert store.step_of(found[0]) == newest
    assert [store.damage(path) for path in found] == [[] for _ in found]
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {found[0]}" in result.stderr
    assert job.outcome() == unbroken.outcome()


# Of the weights and the optimizer's states of one rank.
@pytest.mark.parametrize(
    ("strategy", "shard"),
    [
        pytest.param("fsdp2", "pytorch_model_fsdp_0/__1_0.distcp", marks=pytest.mark.slow),
        ("fsdp2", "optimizer_0/__1_0.distcp"),
        pytest.param("zero3", "*_rank_1_*model_states.pt", marks=pytest.mark.slow),
        pytest.param("zero3", "*_rank_1_*optim_states.pt", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_gone_on_from(
    finished_run: FinishedRun, tmp_path: Path, strategy: str, shard: str
) -> None:
    kept = ("--save_total_limit", "9")
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)), kept)
    result = job.start()
    assert result.returncode == 0, result.stderr
    unbroken = job.outcome()
    for name in ("metrics.json", "status.json", "model.safetensors"):  # as if it had been killed just before
        (job.folder / name).unlink()
    (path,) = (job.folder / "checkpoint-8").rglob(shard)
    spoil(path, "FLIPPED")
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Passed over checkpoint-8: {path} is not as it was written" in result.stderr
    assert f"Resuming from {job.folder / 'checkpoint-6'}" in result.stderr
    assert job.outcome() == unbroken
    assert store.damage(job.folder / "checkpoint-8") == []
