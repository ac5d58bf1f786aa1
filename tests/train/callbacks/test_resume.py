"""What a run takes over from its checkpoint beside weights and states."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from indictune.checkpoint import abandoned, copying, disk_errors, store
from indictune.stop_signals import NotBegun, StopRequest
from indictune.train.callbacks.resume import LeaveBehind, unlogged
from tests.checkpoint.test_store import Dead, calls_of, dying_at, manifest, whole, write
from tests.supervise.test_run_folder import interrupt, largest_file


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    """Of one process, which is rank 0."""
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def begin(begins: LeaveBehind, args: TrainingArguments) -> None:
    begins.on_train_begin(args, TrainerState(), TrainerControl())


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
    begins = LeaveBehind(tmp_path, checkpoint, None, StopRequest())
    with largest_file(400), pytest.raises(disk_errors.SaveError, match=f"It needs {needed:,} bytes, and "):
        begins.on_train_begin(args, TrainerState(), TrainerControl())


def test_where_a_run_goes_on_from_is_its_own_as_soon_as_the_others_are_moved(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell of them they are read, which may take long."""
    write(tmp_path, 8)
    monkeypatch.setattr(abandoned, "told", interrupt)
    with pytest.raises(KeyboardInterrupt):
        begin(LeaveBehind(tmp_path, write(tmp_path / "other", 4), None, StopRequest()), args)
    assert whole(tmp_path) == [4]


def test_a_stop_while_another_folders_checkpoint_is_copied_leaves_all_as_it_was(
    tmp_path: Path, args: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 8)
    request, copied = StopRequest(), []

    def asked_to_stop(source: Path, target: Path) -> None:
        copied.append(source)
        target.write_bytes(source.read_bytes())
        request.asked = True

    monkeypatch.setattr(shutil, "copyfile", asked_to_stop)
    with pytest.raises(NotBegun, match=r"stopped before its first step\."):
        begin(LeaveBehind(tmp_path, write(tmp_path / "other", 4), None, request), args)
    assert len(copied) == 1
    assert (whole(tmp_path), abandoned.folders(tmp_path)) == ([8], [])
    assert not (tmp_path / store.UNFINISHED).exists()


def test_a_best_that_is_damaged_is_left_where_it_is_and_named(
    tmp_path: Path, args: TrainingArguments, caplog: pytest.LogCaptureFixture
) -> None:
    best = write(tmp_path / "other", 2)
    (best / "model.safetensors").write_bytes(b"damaged")
    begin(LeaveBehind(tmp_path, write(tmp_path / "other", 4), best, StopRequest()), args)
    assert whole(tmp_path) == [4]
    (message,) = caplog.messages
    assert message == (
        f"{best}, the best, is not copied, and is forgotten: {best / 'model.safetensors'} has 7 bytes instead of 700"
    )


def test_a_disk_without_room_for_the_records_of_what_is_left_behind_has_no_part_of_them(
    tmp_path: Path, args: TrainingArguments
) -> None:
    (tmp_path / "train_log.jsonl").write_text("{}\n" * 200)
    earlier = write(tmp_path, 2)
    write(tmp_path, 4)
    copied = tmp_path / store.UNFINISHED / "abandoned" / "train_log.jsonl"
    told = (
        f"the records of what is left behind could not be written to {tmp_path}: {copied}: File too large. It needs "
        r"600 bytes, and [\d,]+ are free. checkpoint-4 is whole; when there is room, the same command goes on."
    )
    with largest_file(100), pytest.raises(disk_errors.SaveError, match=told):
        begin(LeaveBehind(tmp_path, earlier, None, StopRequest()), args)
    assert abandoned.folders(tmp_path) == []
    assert whole(tmp_path) == [4, 2]
    assert not (tmp_path / store.UNFINISHED).exists()


@pytest.mark.parametrize(
    ("before", "after"), [([8, 6, 2], [[8, 6, 2], [6, 2], [2], [4, 2]]), ([], [[], [4, 2]])], ids=["a run", "none"]
)
def test_a_run_recovers_wherever_its_coming_from_another_folder_was_cut(
    tmp_path: Path, args: TrainingArguments, before: list[int], after: list[list[int]]
) -> None:
    """It is as it was, or a part of that; or it goes on from the other's checkpoint, with its best."""
    state = {"best_model_checkpoint": "other/checkpoint-2", "best_metric": 0.9}
    best, checkpoint = (write(tmp_path / "other", step, state=state) for step in (2, 4))

    def run(folder: Path) -> LeaveBehind:
        folder.mkdir()
        for step in before:
            write(folder, step, state={"best_model_checkpoint": "out/checkpoint-2", "best_metric": 0.5})
        (folder / "train_log.jsonl").write_text("{}\n")
        return LeaveBehind(folder, checkpoint, best, StopRequest())

    counted = run(tmp_path / "counted")
    calls = calls_of(lambda: begin(counted, args))
    found = []
    for cut in range(1, calls + 1):
        begins = run(tmp_path / str(cut))
        with pytest.MonkeyPatch.context() as patch:
            dying_at(cut, patch)
            with pytest.raises(Dead):
                begin(begins, args)
        copying.recover(begins.output_dir)
        found.append(whole(begins.output_dir))
        assert not (begins.output_dir / store.UNFINISHED).exists()
        if found[-1] == [4, 2]:
            assert store.is_best_of(begins.output_dir / "checkpoint-2", begins.output_dir / "checkpoint-4")
    assert [steps for steps, last in zip(found, [None, *found], strict=False) if steps != last] == after
