"""Which checkpoints are not read without `--trust_checkpoint`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from indictune.checkpoint.resume import check_trusted
from tests.checkpoint.test_store import write
from tests.refusals import refused

CODE = "checkpoint-not-trusted"


def test_a_checkpoint_of_the_run_itself_is_trusted(tmp_path: Path) -> None:
    check_trusted(write(tmp_path, 4), tmp_path, trust_checkpoint=False)


def test_one_from_elsewhere_is_not(tmp_path: Path) -> None:
    named = write(tmp_path / "elsewhere", 4)
    with refused(CODE, str(named), "--trust_checkpoint true", flag="--resume_from_checkpoint"):
        check_trusted(named, tmp_path / "out", trust_checkpoint=False)
    check_trusted(named, tmp_path / "out", trust_checkpoint=True)


def test_a_link_to_one_from_elsewhere_is_not(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    linked = tmp_path / "out" / "checkpoint-4"
    linked.symlink_to(write(tmp_path / "elsewhere", 4))
    with refused(CODE):
        check_trusted(linked, tmp_path / "out", trust_checkpoint=False)


@pytest.mark.parametrize("name", ["optimizer.pt", "shards", "."])
def test_one_that_others_can_write_is_not(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, 4)
    (folder / name).chmod(0o777)
    with refused(CODE, f"chmod go-w {folder / name}"):
        check_trusted(folder, tmp_path, trust_checkpoint=False)


def test_one_of_another_user_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, 4)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    with refused(CODE, "belongs to another user"):
        check_trusted(folder, tmp_path, trust_checkpoint=False)
