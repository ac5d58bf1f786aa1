"""Which snapshot in memory becomes a checkpoint on the disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indictune.checkpoint import snapshots, store
from indictune.checkpoint.snapshots import Snapshots, bring_to_disk, folder_of
from indictune.checkpoint.store import FileDigest, Manifest


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a run of one process."""
    monkeypatch.setattr(snapshots, "MEMORY", tmp_path / "memory")
    ranks = {"world_size": 1, "process_index": 0, "local_process_index": 0}
    disk = {"output_dir": str(tmp_path / "out"), "should_save": True, "save_on_each_node": False}
    return SimpleNamespace(**ranks, **disk, snapshot_steps=1)


def manifest(step: int, *names: str) -> Manifest:
    files = {name: FileDigest(0, "") for name in names}
    facts = {"strategy": "single", "world_size": 1, "global_batch_size": 8, "save": "", "data": "", "recipe": ""}
    return Manifest(step=step, rows_of_epoch=0, versions={}, evaluation_due=False, files=files, **facts)  # type: ignore[arg-type]


def take(args: Any, step: int) -> Snapshots:
    """A snapshot with one file, which holds its step."""
    made = Snapshots(args)
    folder = made.unfinished(step)
    folder.mkdir(parents=True)
    (folder / "state.pt").write_text(str(step), encoding="utf-8")
    assert made.complete(manifest(step)) == ["state.pt"]
    return made


def steps(folder: Path) -> list[int]:
    return [store.step_of(each) for each in store.checkpoints_in(folder)]


def test_the_newest_becomes_a_whole_checkpoint(args: Any) -> None:
    for step in (3, 5):
        take(args, step)
    memory = Snapshots(args).folder
    assert steps(memory) == [5, 3]
    bring_to_disk(args, True, None)
    output_dir = Path(args.output_dir)
    assert steps(output_dir) == [5]
    assert store.damage(output_dir / "checkpoint-5") == []
    assert (output_dir / "checkpoint-5/state.pt").read_text(encoding="utf-8") == "5"
    assert not memory.exists()


def test_one_that_lacks_a_file_is_passed_over(args: Any) -> None:
    """As where two neighbours are lost, or a node was killed between its rename and the others'."""
    for step in (3, 5):
        made = take(args, step)
    (made.folder / "checkpoint-5/state.pt").unlink()
    bring_to_disk(args, True, None)
    assert steps(Path(args.output_dir)) == [3]


def test_a_newer_checkpoint_on_the_disk_wins(args: Any) -> None:
    take(args, 3)
    newer = Path(args.output_dir) / "checkpoint-4"
    newer.mkdir()
    store.seal(newer, manifest(4))
    bring_to_disk(args, True, None)
    assert steps(Path(args.output_dir)) == [4]


def test_a_run_that_does_not_resume_uses_none(args: Any) -> None:
    made = take(args, 3)
    bring_to_disk(args, False, None)
    assert steps(Path(args.output_dir)) == []
    assert not made.folder.exists()


def test_another_run_uses_none(args: Any, tmp_path: Path) -> None:
    """A run that begins again in a new folder of the same name, too."""
    made = take(args, 3)
    Path(args.output_dir).rename(tmp_path / "moved")
    Path(args.output_dir).mkdir()
    bring_to_disk(args, True, None)
    assert steps(Path(args.output_dir)) == []
    assert folder_of(Path(args.output_dir)) != made.folder
    assert steps(made.folder) == [3]


@pytest.mark.parametrize("name", ["", "..", "../../home", "\u0905" * 32])
def test_a_name_that_no_run_wrote_is_not_used(args: Any, name: str) -> None:
    """The folder in memory is deleted at the end, so a run's folder from elsewhere must not choose it."""
    marker = Path(args.output_dir) / ".snapshots"
    marker.parent.mkdir()
    marker.write_text(name, encoding="utf-8")
    assert folder_of(marker.parent) is None
    assert Snapshots(args).folder.parent.name.startswith("indictune-")


def test_room_is_made_for_a_snapshot(args: Any) -> None:
    """One of two stays while the next is written: the one that is being copied to the disk, or else the newest."""
    for step in (3, 5):
        made = take(args, step)
    made.make_room(copied=3)
    assert steps(made.folder) == [3]
    take(args, 7)
    made.make_room(copied=None)
    assert steps(made.folder) == [7]
    made.drop_until(6)
    assert steps(made.folder) == [7]
    made.drop_until(7)
    assert not made.folder.exists()
