"""One run at a time in a folder. `tests/data/test_cache.py` has the lock of the cache."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from indictune.files import lock_if_possible
from indictune.supervise import run_folder
from tests.ranks.launching import ROOT
from tests.refusals import refused

HOLD = """
import os, sys, time
from pathlib import Path
from indictune.supervise import run_folder
held = run_folder.lock_run_folder(Path(sys.argv[1]), sys.argv[2])
child = os.fork()  # as those that read rows ahead
if child:
    print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def holding(folder: Path, launch: str = "one") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has the folder, and the number of its child."""
    command = [sys.executable, "-c", HOLD, str(folder), launch]
    with subprocess.Popen(command, cwd=ROOT, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            yield holder, child
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


@pytest.mark.more
def test_a_folder_that_another_process_has_is_refused_with_its_name(tmp_path: Path) -> None:
    with holding(tmp_path) as (holder, _):
        name = f"process {holder.pid} on {socket.gethostname()}"
        with refused("run-folder-in-use", str(tmp_path), name, flag="--output_dir"):
            run_folder.lock_run_folder(tmp_path, "one")
        with refused("run-folder-in-use", name):
            run_folder.wait_for_other_launch(tmp_path, "another", rank=0)


def test_a_process_that_is_killed_keeps_nobody_out_though_its_child_lives(tmp_path: Path) -> None:
    with holding(tmp_path) as (holder, child):
        holder.kill()
        holder.wait()
        os.kill(child, 0)
        with run_folder.lock_run_folder(tmp_path, "one"):
            content = (tmp_path / run_folder.RUN_LOCK).read_text(encoding="utf-8")
    assert content.splitlines()[0] == f"process {os.getpid()} on {socket.gethostname()}"


@pytest.mark.more
def test_a_process_of_another_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with holding(tmp_path) as (holder, _):
        name = f"process {holder.pid} on node17"
        (tmp_path / run_folder.RUN_LOCK).write_text(f"{name}\none")
        monkeypatch.setattr(run_folder, "PATIENCE_S", 0.5)
        with refused("run-folder-in-use", name):
            run_folder.wait_for_other_launch(tmp_path, "another", rank=0)
        monkeypatch.setattr(run_folder, "PATIENCE_S", 60)
        threading.Timer(2, holder.kill).start()
        run_folder.wait_for_other_launch(tmp_path, "another", rank=0)
    assert f"--output_dir {tmp_path}: {name} writes to it. Waiting for its end." in caplog.messages


class TestOtherRanks:
    def test_they_wait_for_no_process_of_their_own_launch(self, tmp_path: Path) -> None:
        run_folder.wait_for_other_launch(tmp_path, "one", rank=1)
        with holding(tmp_path):
            run_folder.wait_for_other_launch(tmp_path, "one", rank=1)

    @pytest.mark.more
    def test_they_wait_while_another_launch_has_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with holding(tmp_path) as (holder, _):
            monkeypatch.setattr(run_folder, "PATIENCE_S", 0.5)
            with refused("run-folder-in-use", f"process {holder.pid} on "):
                run_folder.wait_for_other_launch(tmp_path, "another", rank=1)
            monkeypatch.setattr(run_folder, "PATIENCE_S", 60)
            threading.Timer(2, holder.kill).start()
            run_folder.wait_for_other_launch(tmp_path, "another", rank=1)
            assert holder.wait(0) == -signal.SIGKILL

    @pytest.mark.more
    def test_to_look_keeps_nobody_out(self, tmp_path: Path) -> None:
        with run_folder.lock_run_folder(tmp_path, "one"):
            pass
        looking = "import sys\nfrom pathlib import Path\nfrom indictune.supervise import run_folder\n"
        looking += "print(1, flush=True)\nwhile True: run_folder.of_another_launch(Path(sys.argv[1]), 'another')\n"
        command = [sys.executable, "-c", looking, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=-1) as looker:
            assert looker.stdout is not None
            looker.stdout.readline()
            try:
                for _ in range(500):
                    with run_folder.lock_run_folder(tmp_path, "one"):
                        pass
            finally:
                looker.kill()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    (tmp_path / run_folder.RUN_LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        run_folder.lock_run_folder(tmp_path, "one")
    assert (tmp_path / "other").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_written_to_all_the_same(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with run_folder.lock_run_folder(tmp_path, "one"), lock_if_possible(tmp_path / "lock"):
        run_folder.wait_for_other_launch(tmp_path, "another", rank=0)
    assert (tmp_path / run_folder.RUN_LOCK).read_text(encoding="utf-8").startswith(f"process {os.getpid()} on ")
