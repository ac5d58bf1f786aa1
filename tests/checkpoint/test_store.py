"""Checkpoints as files: written whole, distinguished from damaged ones, deleted in order."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from indictune.checkpoint import save, store
from indictune.checkpoint.store import MANIFEST, UNFINISHED, FileDigest, Manifest
from indictune.data.cache import write_through
from indictune.supervise.run_folder import check_folder
from tests.supervise.test_run_folder import largest_file

FILES = {"model.safetensors": b"weights" * 100, "optimizer.pt": b"states" * 50, "shards/0.distcp": b"part"}


def manifest(step: int, **fields: Any) -> Manifest:
    about = Manifest(
        step=step,
        rows_of_epoch=16,
        strategy="ddp",
        world_size=2,
        global_batch_size=8,
        save="s",
        data="d",
        recipe="r",
        versions={"torch": "2"},
        evaluation_due=False,
        files={},
    )
    return replace(about, **fields)


def write(
    output_dir: Path, step: int, mark: bytes = b"", state: dict[str, object] | None = None, recipe: str | None = None
) -> Path:
    """A checkpoint as a run commits it."""
    folder = output_dir / UNFINISHED / f"checkpoint-{step}"
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content + mark)
    (folder / "trainer_state.json").write_text(json.dumps(state or {}), encoding="utf-8")
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    digests = store.sync_files(folder, store.files_in(folder))
    final = store.path_of(output_dir, step)
    store.seal(folder, manifest(step, files=digests))
    store.give_name(folder, final)
    return final


def whole(output_dir: Path) -> list[int]:
    return [store.step_of(path) for path in store.checkpoints_in(output_dir) if not store.damage(path)]


def test_a_committed_checkpoint_is_whole_and_can_be_written_by_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = write(tmp_path, 4)
    finally:
        os.umask(before)
    assert store.damage(folder) == []
    assert sorted(found.relative_to(folder).as_posix() for found in folder.rglob("*") if found.is_file()) == [
        *("manifest.json", "model.safetensors", "optimizer.pt", "shards/0.distcp", "trainer_state.json"),
    ]
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("umask", [0o000, 0o022])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_writes_no_folders_through_and_has_no_modes_takes_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, umask: int
) -> None:
    """As some network mounts, and those of memory sticks."""
    fsync = os.fsync

    def of_files_alone(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", of_files_alone)
    monkeypatch.setattr(os, "chmod", refuse)
    before = os.umask(umask)
    try:
        write(tmp_path, 4)
    finally:
        os.umask(before)
    assert whole(tmp_path) == [4]


def test_the_names_in_a_checkpoint_are_on_the_disk_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def noted(path: Path) -> None:
        if path.is_dir():
            order.append((path, store.checkpoints_in(tmp_path)))
        write_through(path)

    monkeypatch.setattr(store, "write_through", noted)
    final = write(tmp_path, 4)
    unfinished = tmp_path / UNFINISHED / final.name
    assert order == [(unfinished / "shards", []), (unfinished, []), (tmp_path, [final])]


def test_a_file_that_does_not_reach_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"Invalid argument: '.*/model\.safetensors'"):
        write(tmp_path, 4)
    assert whole(tmp_path) == []


@pytest.mark.parametrize(
    ("before", "advice"), [([2], "checkpoint-2 is whole"), ([], "There is no earlier checkpoint")]
)
def test_a_checkpoint_whose_name_may_not_be_on_disk_is_not_reported_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[int], advice: str
) -> None:
    for step in before:
        write(tmp_path, step)

    def of_all_but_names(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        write_through(path)

    monkeypatch.setattr(store, "write_through", of_all_but_names)
    with (
        pytest.raises(save.SaveError) as raised,
        save.reporting(tmp_path, "checkpoint-4", tmp_path / UNFINISHED, lambda: 7),
    ):
        write(tmp_path, 4)
    assert str(raised.value).startswith(f"checkpoint-4 could not be written to {tmp_path}: {tmp_path}: Input/output")
    assert str(raised.value).endswith(
        f". {advice}. When it can be written, --resume_from_checkpoint auto continues the run."
    )
    assert whole(tmp_path) == [4, *before]
    store.remove_leftovers(tmp_path)
    assert whole(tmp_path) == [4, *before]


def test_a_limit_on_the_size_of_files_is_named_where_torch_gives_no_reason(tmp_path: Path) -> None:
    unfinished = tmp_path / UNFINISHED
    unfinished.mkdir()
    with (
        pytest.raises(save.SaveError) as raised,
        largest_file(100_000),
        save.reporting(tmp_path, "checkpoint-4", unfinished, lambda: 4_000_000),
    ):
        torch.save(torch.zeros(1_000_000), unfinished / "optimizer.pt")
    assert os.strerror(errno.EFBIG) in str(raised.value)


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    other = path.parent / "other"
    other.write_bytes(path.read_bytes()[::-1])
    other.rename(path)


def make_stale(path: Path) -> None:
    output_dir = next(parent.parent for parent in path.parents if parent.name == "checkpoint-4")
    older = write(output_dir / "other run", 4, b"older")
    shutil.copy(older / path.relative_to(output_dir / "checkpoint-4"), path)


def link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize("corrupt", [delete, empty, truncate, lengthen, flip_a_bit, swap, make_stale])
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, corrupt: Callable[[Path], None]) -> None:
    write(tmp_path, 2)
    folder = write(tmp_path, 4)
    corrupt(folder / name)
    first = store.damage(folder)[0]
    named = folder if name == MANIFEST else folder / name  # another run's manifest tells of other files
    assert str(named) in first
    assert whole(tmp_path) == [2]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found_by_the_one_that_reads_it(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, 4)
    flip_a_bit(folder / name)
    found = [store.damage(folder, share=slice(rank, None, 2)) for rank in range(2)]
    assert sorted(found) == [[], [f"{folder / name} is not as it was written"]]


def test_a_manifest_too_deep_to_be_read_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    (folder / MANIFEST).write_text("[" * 200_000)
    assert store.damage(folder) == [f"{folder / MANIFEST} is not as it was written"]


def test_a_link_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    link(folder / "optimizer.pt")
    assert store.damage(folder) == [
        f"{folder / 'optimizer.pt'} is a link",
        f"{folder / 'target'} is not in manifest.json",
    ]


def test_a_file_that_was_not_there_is_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    assert store.damage(folder) == [f"{folder / 'pytorch_model.bin'} is not in manifest.json"]


def test_a_checkpoint_under_another_name_is_damage(tmp_path: Path) -> None:
    write(tmp_path, 4).rename(tmp_path / "checkpoint-9")
    assert store.damage(tmp_path / "checkpoint-9") == [f"{tmp_path / 'checkpoint-9'} holds step 4"]


def test_large_files_are_compared_by_size_if_it_must_be_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, 4)
    flip_a_bit(folder / "optimizer.pt")
    assert store.damage(folder, thorough=False) == store.damage(folder)
    monkeypatch.setattr(store, "_QUICKLY_READ_BYTES", 200)
    assert store.damage(folder, thorough=False) == []
    truncate(folder / "optimizer.pt")
    assert store.damage(folder, thorough=False) == [f"{folder / 'optimizer.pt'} has 299 bytes instead of 300"]


CALLS = ((os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "chmod"), (shutil, "rmtree"))


class Dead(BaseException):
    """Stands for a process that is no more."""


def dying_at(number: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Die before call `number` of what changes the disk; the list counts the calls."""
    calls = [0]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            calls[0] += 1
            if calls[0] >= number:  # nothing more happens, in `finally` neither
                raise Dead
            return original(*args, **settings)

        return call

    for owner, name in CALLS:
        patch.setattr(owner, name, counted(getattr(owner, name)))
    return calls


def calls_of(act: Callable[[], object]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        calls = dying_at(10**9, patch)
        act()
        return calls[0]


@pytest.mark.parametrize("replacing", [False, True])
def test_a_run_recovers_wherever_its_save_was_cut(tmp_path: Path, replacing: bool) -> None:
    """It has what it had before, or from some write on what it was saving, and nothing else."""

    def prepared(folder: Path) -> Path:
        write(folder, 2)
        if replacing:
            write(folder, 4, b"older")
        return folder

    def is_older(checkpoint: Path) -> bool:
        return (checkpoint / "model.safetensors").read_bytes().endswith(b"older")

    number = calls_of(lambda: write(prepared(tmp_path / "counted"), 4))
    first = calls_of(lambda: prepared(tmp_path / "before"))
    assert number - first > 10
    found = []
    for cut in range(1, number - first + 1):
        folder = prepared(tmp_path / str(cut))
        with pytest.MonkeyPatch.context() as patch:
            dying_at(cut, patch)
            with pytest.raises(Dead):
                write(folder, 4)
        assert set(whole(folder)) == {store.step_of(path) for path in store.checkpoints_in(folder)}
        store.remove_leftovers(folder)
        assert {path.name for path in folder.iterdir()} == {f"checkpoint-{step}" for step in whole(folder)}
        found.append((whole(folder), [is_older(path) for path in store.checkpoints_in(folder)]))
        write(folder, 4)
        assert whole(folder) == [4, 2]
    before = ([4, 2], [True, False]) if replacing else ([2], [False])
    assert [each for each, last in zip(found, [None, *found], strict=False) if each != last] == [
        before,
        ([4, 2], [False, False]),
    ]


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [(None, None, [8, 6, 4, 2]), (2, None, [8, 6]), (2, 2, [8, 2]), (1, 2, [8, 2]), (1, 8, [8]), (3, 4, [8, 6, 4])],
)
def test_the_oldest_go_but_never_the_best_or_the_last(
    tmp_path: Path, limit: int | None, best: int | None, left: list[int]
) -> None:
    for step in (2, 4, 6, 8):
        write(tmp_path, step)
    store.rotate(tmp_path, limit, [store.path_of(tmp_path, step) for step in (8, best) if step])
    assert whole(tmp_path) == left
    assert {path.name for path in tmp_path.iterdir()} - {UNFINISHED} == {f"checkpoint-{step}" for step in left}


class TestALinkToACheckpoint:
    """Which a user has made, to a larger disk: the link goes, and what it points to stays."""

    @pytest.fixture
    def moved(self, tmp_path: Path) -> Path:
        return write(tmp_path / "larger disk", 2)

    @pytest.fixture
    def out(self, tmp_path: Path, moved: Path) -> Path:
        for step in (4, 6):
            write(tmp_path / "out", step)
        (tmp_path / "out" / "checkpoint-2").symlink_to(moved)
        return tmp_path / "out"

    def left(self, out: Path) -> set[str]:
        return {path.name for path in out.iterdir()} - {UNFINISHED}

    def test_gives_way_to_newer_ones(self, out: Path, moved: Path) -> None:
        store.rotate(out, 2, [out / "checkpoint-6"])
        assert self.left(out) == {"checkpoint-4", "checkpoint-6"}
        assert store.damage(moved) == []

    @pytest.mark.parametrize("is_there", [True, False])
    def test_gives_way_to_one_of_its_name(self, out: Path, moved: Path, is_there: bool) -> None:
        target = moved if is_there else moved.rename(moved.with_name("checkpoint-9"))
        target_files = store.files_in(target)
        written = write(out, 2, b"newer")
        assert not written.is_symlink()
        assert whole(out) == [6, 4, 2]
        assert self.left(out) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
        assert store.files_in(target) == target_files

    @pytest.mark.parametrize("name", [f"{UNFINISHED}-checkpoint-2", ".replaced-checkpoint"])
    def test_is_no_leftover_that_stays_or_keeps_a_run_from_its_folder(self, out: Path, moved: Path, name: str) -> None:
        """Of a run that was killed, or of one whose links stayed under that name."""
        write(out, 2)
        (out / name).symlink_to(moved)
        check_folder(out)
        store.remove_leftovers(out)
        assert self.left(out) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
        assert store.damage(moved) == []

    def test_is_given_back_where_the_one_of_its_name_was_cut(self, out: Path, moved: Path) -> None:
        (out / "checkpoint-2").rename(out / ".replaced-checkpoint")
        store.remove_leftovers(out)
        assert (out / "checkpoint-2").readlink() == moved


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
digests = st.builds(FileDigest, bytes=st.integers(0), sha256=names)
manifests = st.builds(
    Manifest,
    step=st.integers(0),
    rows_of_epoch=st.integers(0),
    strategy=names,
    world_size=st.integers(1),
    global_batch_size=st.integers(1),
    data=names,
    recipe=names,
    versions=st.dictionaries(names, names, max_size=3),
    evaluation_due=st.booleans(),
    files=st.dictionaries(names, digests, max_size=5),
    validation=st.none() | names,
    planned=st.booleans(),
)


@given(manifests)
def test_a_manifest_is_read_as_it_was_written(written: Manifest) -> None:
    assert Manifest.from_json(written.to_json()) == written


@given(manifests, st.data())
def test_a_manifest_with_one_other_character_is_not_read(written: Manifest, data: st.DataObject) -> None:
    text = written.to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(exclude_categories=["Cs"]).filter(lambda character: character != text[place]))
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Manifest.from_json(text[:place] + other + text[place + 1 :])
