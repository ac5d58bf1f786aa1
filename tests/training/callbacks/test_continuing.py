"""What a run takes over from its checkpoint beside weights and states."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from indictune.training.callbacks.continuing import LeaveBehind, unlogged
from indictune.training.checkpoints import disks, store
from tests.training.checkpoints.test_store import manifest, write
from tests.training.test_output import largest_file


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
    assert unlogged(tmp_path, manifest(4, world_size=1), args) == (1.0, 3)
    assert unlogged(tmp_path, manifest(4, world_size=2), args) == (1.5, 3)


def test_a_rank_whose_loss_is_on_another_disk_takes_the_mean_of_this_ones(
    tmp_path: Path, args: TrainingArguments
) -> None:
    for rank in (2, 3):
        note(tmp_path, rank, rank + 1.0)
    assert unlogged(tmp_path, manifest(4, world_size=1), args) == (3.5, 3)


def test_a_checkpoint_without_any_is_told(
    tmp_path: Path, args: TrainingArguments, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert unlogged(tmp_path, manifest(4, world_size=1), args) == (0.0, 4)
    (message,) = caplog.messages
    assert message.endswith("the next one that is logged is of the steps after 4 alone.")


def test_a_disk_without_room_for_the_checkpoint_of_another_folder_is_told_its_bytes(
    tmp_path: Path, args: TrainingArguments
) -> None:
    """There may be no other to tell them by."""
    checkpoint = write(tmp_path / "other", 4)
    needed = store.read_manifest(checkpoint).bytes  # type: ignore[union-attr]
    begins = LeaveBehind(tmp_path, checkpoint, None)
    with largest_file(400), pytest.raises(disks.SaveError, match=f"It needs {needed:,} bytes, and "):
        begins.on_train_begin(args, TrainerState(), TrainerControl())
