"""A lock that a killed build has left does not hold up later runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from indictune.config.plan import Launch
from indictune.distributed import operator_locks

ZERO = Launch("zero2", world_size=2, local_world_size=2)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that compiles an operator."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(operator_locks, "SECONDS_BETWEEN_LOOKS", 0.05)
    (tmp_path / "cpu_adam").mkdir()
    program = [sys.executable, "-c", _BUILD, str(tmp_path / "cpu_adam" / "lock")]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as builds:
        assert builds.stdout is not None
        assert builds.stdout.readline() == b"builds\n"
        yield builds
        builds.kill()


@pytest.fixture
def held(builder: subprocess.Popen[bytes], tmp_path: Path) -> Path:
    """Its lock."""
    return tmp_path / "cpu_adam" / "lock"


@pytest.fixture
def lock(builder: subprocess.Popen[bytes], held: Path) -> Path:
    """Its lock, which it has left when it was killed."""
    builder.kill()
    builder.wait()
    return held


_BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton

assert FileBaton(sys.argv[1]).try_acquire()
print("builds", flush=True)
time.sleep(600)
"""


def make_old(lock: Path) -> None:
    long_ago = time.time() - operator_locks.SECONDS_OF_A_BUILD - 1
    os.utime(lock, (long_ago, long_ago))


def test_one_that_is_held_is_left_to_torch_however_old(held: Path) -> None:
    make_old(held)
    operator_locks.remove_dead_locks(ZERO, local_rank=0)
    assert held.exists()


def test_one_left_behind_is_removed_when_it_is_older_than_a_build(lock: Path) -> None:
    make_old(lock)
    operator_locks.remove_dead_locks(ZERO, local_rank=0)
    assert not lock.exists()


def test_a_young_one_is_removed_where_no_other_machine_has_the_disk(lock: Path, tmp_path: Path) -> None:
    if operator_locks._kind_of_disk(tmp_path) not in operator_locks._OF_ONE_MACHINE:
        pytest.skip("the temporary folder may be another machine's too")
    waiting = threading.Thread(target=operator_locks.remove_dead_locks, args=(ZERO, 0), daemon=True)
    waiting.start()
    waiting.join(timeout=60)
    assert not lock.exists()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_young_one_may_be_held_elsewhere_and_is_waited_for_by_name(
    lock: Path, local_rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operator_locks, "_OF_ONE_MACHINE", frozenset())
    waiting = threading.Thread(target=operator_locks.remove_dead_locks, args=(ZERO, local_rank))
    waiting.start()
    waiting.join(timeout=1)
    assert waiting.is_alive()
    assert lock.exists()
    assert [record.getMessage() for record in caplog.records if str(lock) in record.getMessage()]
    lock.unlink()
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_one_rank_of_a_machine_removes_it(lock: Path) -> None:
    make_old(lock)
    waiting = threading.Thread(target=operator_locks.remove_dead_locks, args=(ZERO, 1))
    waiting.start()
    waiting.join(timeout=1)
    assert waiting.is_alive()
    assert lock.exists()
    operator_locks.remove_dead_locks(ZERO, local_rank=0)
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_only_deepspeed_compiles(lock: Path) -> None:
    operator_locks.remove_dead_locks(Launch("ddp", world_size=2), local_rank=0)
    assert lock.exists()


def test_upstream_waits_for_a_lock_left_behind(lock: Path) -> None:
    """When this fails, torch sees for itself that nobody builds, and `indictune.distributed.operator_locks` can go."""
    make_old(lock)
    waiting = threading.Thread(target=FileBaton(str(lock)).wait)
    waiting.start()
    waiting.join(timeout=2)
    waits = waiting.is_alive()
    lock.unlink()
    waiting.join(timeout=30)
    assert waits
