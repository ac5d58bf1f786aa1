"""What a run takes over from its checkpoint, other than weights and states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import TrainingArguments

from indictune.training.callbacks.restore_progress import unlogged_loss
from tests.checkpoint.test_store import manifest


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    """Of one process, which is rank 0."""
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def note(checkpoint: Path, rank: int, loss: float) -> None:
    (checkpoint / f"unlogged_{rank}.json").write_text(json.dumps({"loss": loss, "since_step": 3}))


def test_a_rank_takes_its_own_loss_and_another_number_of_ranks_the_mean(
    tmp_path: Path, args: TrainingArguments
) -> None:
    for rank in (0, 1):
        note(tmp_path, rank, rank + 1.0)
    assert unlogged_loss(tmp_path, manifest(4, world_size=1), args) == (1.0, 3)
    assert unlogged_loss(tmp_path, manifest(4, world_size=2), args) == (1.5, 3)


def test_a_rank_whose_loss_is_on_another_disk_takes_the_mean_of_this_ones(
    tmp_path: Path, args: TrainingArguments
) -> None:
    for rank in (2, 3):
        note(tmp_path, rank, rank + 1.0)
    assert unlogged_loss(tmp_path, manifest(4, world_size=1), args) == (3.5, 3)


def test_without_any_the_loss_begins_anew(tmp_path: Path, args: TrainingArguments) -> None:
    assert unlogged_loss(tmp_path, manifest(4, world_size=1), args) == (0.0, 4)
