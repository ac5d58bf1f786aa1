"""A model's folder is written whole or not at all, wherever it is to stand."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors import SafetensorError

from indictune.errors import UserError
from indictune.models.atomic_folder import check_free, let_read, whole_folder


def write(folder: Path, error: Exception | None = None) -> None:
    """A model of one file, which may fail when it is written."""
    check_free(folder, "--output_dir")
    with whole_folder(folder, "--output_dir", 3, "name another disk") as model:
        model.mkdir()
        (model / "config.json").write_text("new")
        (model.parent / "beside").mkdir()
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


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device")])
def test_an_empty_folder_keeps_its_group_and_its_rights(tmp_path: Path, error: OSError | None) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    groups = {*os.getgroups(), os.getegid()} - {folder.stat().st_gid} if os.geteuid() != 0 else {12345}
    group = min(groups, default=folder.stat().st_gid)  # of a user with one group it is that one
    os.chown(folder, -1, group)
    folder.chmod(0o2770)
    with nullcontext() if error is None else pytest.raises(UserError, match="No space left"):
        write(folder, error)
    assert (folder.stat().st_gid, stat.S_IMODE(folder.stat().st_mode)) == (group, 0o2770)
    assert [path.stat().st_gid for path in folder.iterdir()] == ([group] if error is None else [])


@pytest.fixture(params=["tmpfs", "bind"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty folder where another file system begins, or a folder of the same one is to be seen."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = ["-t", "tmpfs", "tmpfs"] if request.param == "tmpfs" else ["--bind", str(folder)]
    made = subprocess.run(["mount", *mount, str(folder)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_mount_point_is_refused_before_anything_is_written(mounted: Path) -> None:
    never = AssertionError("it is written")
    with pytest.raises(UserError, match=rf"--output_dir {mounted}: (is a mount point|could not be written: .* busy)"):
        write(mounted, never)
    if os.path.ismount(mounted):  # it does not see a folder of the same file system, which only then does not give way
        (mounted.parent / "link").symlink_to(mounted)
        with pytest.raises(UserError, match="link: is a mount point"):
            check_free(mounted.parent / "link", "--output_dir")
        (mounted.parent / "link").unlink()
    assert names(mounted.parent) == {"mounted"}
    write(mounted / "new")
    assert names(mounted) == {"new"}


def test_the_folder_of_the_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell would stand in one that is gone."""
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), tmp_path):
        with pytest.raises(UserError, match=r"the folder that the command is typed in, .*; name a new folder in it"):
            write(folder)


def test_what_a_killed_command_has_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".out.unfinished" / "model"
    left.mkdir(parents=True)
    (left / "weights").write_text("of the killed one")
    write(tmp_path / "out")
    assert (names(tmp_path), names(tmp_path / "out")) == ({"out"}, {"config.json"})


WRITES = """
import sys
from pathlib import Path
from indictune.models.atomic_folder import whole_folder
with whole_folder(Path(sys.argv[1]), "--output_dir", 3, "name another disk") as model:
    model.mkdir()
    print("writes", flush=True)
    sys.stdin.readline()
"""


def test_what_another_command_writes_is_left_to_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "writes\n"
        with pytest.raises(UserError, match="out: another command writes it; wait for its end, or name another"):
            write(tmp_path / "out")
        other.communicate("\n")
    assert other.returncode == 0
    assert names(tmp_path) == {"out"}


def test_what_only_has_the_name_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "kept"
    mine.mkdir(parents=True)
    (tmp_path / ".out.unfinished").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"out: .*/\.out\.unfinished is in its way, a link or another user's; remove"):
        write(tmp_path / "out")
    assert mine.is_dir()
    if os.geteuid() == 0:
        (tmp_path / ".out.unfinished").unlink()
        (tmp_path / "mine").rename(tmp_path / ".out.unfinished")
        os.chown(tmp_path / ".out.unfinished", 12345, 12345)
        with pytest.raises(UserError, match="or another user's"):
            write(tmp_path / "out")
        assert names(tmp_path / ".out.unfinished") == {"kept"}


def test_a_folder_that_the_file_system_gives_to_another_user_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS gives root's to nobody, CIFS and exFAT all to the user that they were mounted for."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    write(tmp_path / "out")
    assert (names(tmp_path), names(tmp_path / "out")) == ({"out"}, {"config.json"})


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / ".out.unfinished").mkdir()
    (tmp_path / ".out.unfinished" / ".lock").symlink_to(tmp_path / "theirs")
    with pytest.raises(UserError, match="out: cannot be made"):
        write(tmp_path / "out")
    assert (tmp_path / "theirs").read_text() == "kept"


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
            patch.setattr(os, "chmod", refused)
        let_read(tmp_path)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in sorted(tmp_path.iterdir())]
    assert modes == [0o644, 0o600 if refuses else 0o644, 0o644]


def refused(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "weights"), SafetensorError("I/O error: No space left on device")]
)
def test_a_disk_that_fills_meanwhile_is_told(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "out").mkdir()
    told = r"out: could not be written: .*No space left on device.* Nothing is left of it; the same command begins"
    with pytest.raises(UserError, match=told):
        write(tmp_path / "out", error)
    assert (names(tmp_path), names(tmp_path / "out")) == ({"out"}, set())
