"""A lock that a killed build has left does not hold up later runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.utils.file_baton import FileBaton

from indictune.strategy import extensions
from indictune.strategy.launch import Launch

ZERO = Launch("zero2", world_size=2, local_world_size=2)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a process that was killed while it compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extensions, "SECONDS_BETWEEN_LOOKS", 0.05)
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    killed = subprocess.Popen([sys.executable, "-c", _BUILD, str(path)], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"builds\n"
    yield path
    killed.kill()
    killed.wait()
    killed.stdout.close()


_BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton

assert FileBaton(sys.argv[1]).try_acquire()
print("builds", flush=True)
time.sleep(600)
"""


def kill_whoever_holds(lock: Path) -> None:
    for process in psutil.process_iter():
        if psutil.Process().pid != process.pid and str(lock) in process.cmdline():
            process.kill()
            process.wait()


def make_old(lock: Path) -> None:
    long_ago = time.time() - extensions.SECONDS_OF_A_BUILD - 1
    os.utime(lock, (long_ago, long_ago))


def test_one_that_is_held_is_left_to_torch_however_old(lock: Path) -> None:
    make_old(lock)
    extensions.remove_dead_locks(ZERO, local_rank=0)
    assert lock.exists()


def test_one_left_behind_is_removed_when_it_is_older_than_a_build(lock: Path) -> None:
    kill_whoever_holds(lock)
    make_old(lock)
    extensions.remove_dead_locks(ZERO, local_rank=0)
    assert not lock.exists()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_young_one_may_be_held_elsewhere_and_is_waited_for_by_name(
    lock: Path, local_rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    kill_whoever_holds(lock)
    waiting = threading.Thread(target=extensions.remove_dead_locks, args=(ZERO, local_rank))
    waiting.start()
    waiting.join(timeout=1)
    assert waiting.is_alive()
    assert lock.exists()
    assert [record.getMessage() for record in caplog.records if str(lock) in record.getMessage()]
    lock.unlink()
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_one_rank_of_a_machine_removes_it(lock: Path) -> None:
    kill_whoever_holds(lock)
    make_old(lock)
    waiting = threading.Thread(target=extensions.remove_dead_locks, args=(ZERO, 1))
    waiting.start()
    waiting.join(timeout=1)
    assert waiting.is_alive()
    assert lock.exists()
    extensions.remove_dead_locks(ZERO, local_rank=0)
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_only_deepspeed_compiles(lock: Path) -> None:
    kill_whoever_holds(lock)
    extensions.remove_dead_locks(Launch("ddp", world_size=2), local_rank=0)
    assert lock.exists()


def test_upstream_waits_for_a_lock_left_behind(lock: Path) -> None:
    """When this fails, torch sees for itself that nobody builds, and `indictune.strategy.extensions` can go."""
    kill_whoever_holds(lock)
    make_old(lock)
    waiting = threading.Thread(target=FileBaton(str(lock)).wait)
    waiting.start()
    waiting.join(timeout=2)
    waits = waiting.is_alive()
    lock.unlink()
    waiting.join(timeout=30)
    assert waits
