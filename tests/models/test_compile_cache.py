"""What torch has compiled is taken from a folder of this user's alone."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from indictune.errors import UserError
from indictune.models.compile_cache import check_kept_from_others

OTHER_USER = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Torch's, below a folder of temporary files like /tmp."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(default_cache_dir())


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_it_is_made_for_this_user_alone(folder: Path) -> None:
    check_kept_from_others()
    assert (folder.stat().st_uid, mode(folder)) == (os.getuid(), 0o700)
    (folder / "compiled").touch()
    check_kept_from_others()


def test_one_that_torch_has_just_made_is_closed_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o775)
    check_kept_from_others()
    assert mode(folder) == 0o700


def test_one_of_ones_own_that_others_can_read_is_taken_as_it_is(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    (folder / "compiled").touch()
    check_kept_from_others()
    assert mode(folder) == 0o755


@pytest.mark.parametrize(
    ("group", "mode", "is_taken"), [("own", 0o775, True), ("own", 0o777, False), ("other", 0o775, False)]
)
def test_one_that_the_own_group_may_write_to_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, mode: int, is_taken: bool
) -> None:
    """Most distributions give each user a group of its name, and a umask of 002, by which torch has made it."""
    user = pwd.getpwuid(os.getuid())
    found = {"own": (user.pw_name, "x", user.pw_gid, []), "other": (user.pw_name, "x", user.pw_gid, ["another"])}[
        group
    ]
    monkeypatch.setattr(grp, "getgrgid", {user.pw_gid: grp.struct_group(found)}.__getitem__)
    folder.mkdir()
    os.chown(folder, -1, user.pw_gid)
    (folder / "compiled").touch()
    folder.chmod(mode)
    if is_taken:
        check_kept_from_others()
        return
    with pytest.raises(UserError, match=f"{folder} can be written by other users"):
        check_kept_from_others()


@pytest.mark.parametrize("how", ["open", "a link", "of another user", "below an open folder"])
def test_another_is_refused(folder: Path, how: str) -> None:
    if how == "a link":
        (folder.parent / "elsewhere").mkdir()
        folder.symlink_to(folder.parent / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if how == "open":
        (folder / "compiled").touch()
        folder.chmod(0o777)
    if how == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, OTHER_USER, OTHER_USER)
    if how == "below an open folder":
        folder.parent.chmod(0o777)
    with pytest.raises(UserError, match=f"{folder} can be written by other users.* Remove it, or name a folder of"):
        check_kept_from_others()


def test_torch_takes_a_folder_whoever_has_made_it(tmp_path: Path) -> None:
    """Where this fails, torch looks at whose it is, or keeps it elsewhere (2.13 does not)."""
    program = (
        "from pathlib import Path; from torch._inductor.codecache import _HEADER_DIR\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(cache_dir()); print(Path(_HEADER_DIR).parent)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    own = tmp_path / "torchinductor_me"
    own.mkdir()
    own.chmod(0o777)
    variables |= {"TMPDIR": str(tmp_path), "LOGNAME": "me"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(own), str(own)]
    assert mode(own) == 0o777
