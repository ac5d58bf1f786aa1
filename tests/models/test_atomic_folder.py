"""A model's folder is written whole or not at all, wherever it is to stand."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError

from indictune.models.atomic_folder import check_output_folder, match_config_mode, whole_folder
from tests.refusals import refused


def write(folder: Path, error: Exception | None = None) -> None:
    """A model of one file, which may fail when it is written."""
    check_output_folder(folder, "--output_dir")
    with whole_folder(folder, "--output_dir", 3, "name another disk") as model:
        model.mkdir()
        (model / "config.json").write_text("new")
        (model.parent / "extra").mkdir()
        if error is not None:
            raise error


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_leads_to_the_model(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "disk").mkdir()
    if is_there:
        (tmp_path / "disk" / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "out")
    write(tmp_path / "link")
    assert (tmp_path / "link" / "config.json").read_text() == "new"
    assert (tmp_path / "link").is_symlink()
    assert (names(tmp_path), names(tmp_path / "disk")) == ({"disk", "link"}, {"out"})


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that is a mount point."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_mount_point_is_refused_before_anything_is_written(mounted: Path) -> None:
    (mounted.parent / "link").symlink_to(mounted)
    for folder in (mounted, mounted.parent / "link"):
        with refused("folder-cannot-be-replaced", str(folder), flag="--output_dir"):
            write(folder, AssertionError("written"))
    (mounted.parent / "link").unlink()
    assert names(mounted.parent) == {"mounted"}
    write(mounted / "new")
    assert names(mounted) == {"new"}


def test_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell would stay in a folder that is gone."""
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), tmp_path):
        with refused("folder-cannot-be-replaced"):
            write(folder)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_command_is_not_touched(tmp_path: Path, kind: str) -> None:
    """It may be a killed one, too, or somebody else's link."""
    unfinished, kept = tmp_path / ".out.unfinished", tmp_path / "elsewhere"
    kept.mkdir()
    if kind == "link":
        unfinished.symlink_to(kept)
    else:
        kept = kept.rename(unfinished)
    (kept / "weights").write_text("half")
    with refused("folder-in-use", str(unfinished), flag="--output_dir"):
        write(tmp_path / "out")
    assert (kept / "weights").read_text() == "half"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("refuses", [False, True])
def test_weights_are_as_readable_as_the_configuration_where_modes_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """CIFS and exFAT refuse them, and no root can be refused here."""
    for name, mode in (("config.json", 0o644), ("model.safetensors", 0o600), ("other.safetensors", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    with monkeypatch.context() as patch:
        if refuses:
            patch.setattr(os, "chmod", permission_denied)
        match_config_mode(tmp_path)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in sorted(tmp_path.iterdir())]
    assert modes == [0o644, 0o600 if refuses else 0o644, 0o644]


def permission_denied(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "weights"), SafetensorError("I/O error: No space left on device")]
)
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "out").mkdir()
    with refused("folder-not-written", "No space left on device", flag="--output_dir"):
        write(tmp_path / "out", error)
    assert (names(tmp_path), names(tmp_path / "out")) == ({"out"}, set())
