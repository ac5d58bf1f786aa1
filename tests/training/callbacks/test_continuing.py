"""What a run takes over from its checkpoint beside weights and states."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from indictune.training.callbacks.continuing import LeaveBehind, unlogged
from indictune.training.checkpoints import abandoned, disks, store
from tests.training.checkpoints.test_store import manifest, whole, write
from tests.training.test_output import interrupt, largest_file


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


@pytest.mark.parametrize("of_its_own", [False, True])
def test_a_disk_without_room_for_the_checkpoint_of_another_folder_is_told_its_bytes(
    tmp_path: Path, args: TrainingArguments, of_its_own: bool
) -> None:
    """Not those of another, and there may be none."""
    checkpoint = write(tmp_path / "other", 4)
    if of_its_own:
        write(tmp_path, 8, mark=b"longer")
    needed = store.read_manifest(checkpoint).bytes  # type: ignore[union-attr]
    begins = LeaveBehind(tmp_path, checkpoint, None)
    with largest_file(400), pytest.raises(disks.SaveError, match=f"It needs {needed:,} bytes, and "):
        begins.on_train_begin(args, TrainerState(), TrainerControl())


def test_where_a_run_goes_on_from_is_its_own_as_soon_as_the_others_are_moved(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell of them they are read, which may take long."""
    write(tmp_path, 8)
    monkeypatch.setattr(abandoned, "told", interrupt)
    with pytest.raises(KeyboardInterrupt):
        LeaveBehind(tmp_path, write(tmp_path / "other", 4), None).on_train_begin(
            args, TrainerState(), TrainerControl()
        )
    assert whole(tmp_path) == [4]


def test_a_best_that_is_damaged_is_left_where_it_is(tmp_path: Path, args: TrainingArguments) -> None:
    best = write(tmp_path / "other", 2)
    (best / "model.safetensors").write_bytes(b"damaged")
    LeaveBehind(tmp_path, write(tmp_path / "other", 4), best).on_train_begin(args, TrainerState(), TrainerControl())
    assert whole(tmp_path) == [4]


def test_a_disk_without_room_for_the_records_of_what_is_left_behind_has_no_part_of_them(tmp_path: Path) -> None:
    (tmp_path / "train_log.jsonl").write_text("{}\n" * 200)
    checkpoint = write(tmp_path, 4)
    with largest_file(100), pytest.raises(OSError, match="File too large"):
        abandoned.move([checkpoint], tmp_path / "abandoned-1")
    assert abandoned.folders(tmp_path) == []
    assert whole(tmp_path) == [4]
