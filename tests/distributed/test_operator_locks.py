"""A lock that a killed build left does not hold up later runs for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from indictune.config.plan import Launch
from indictune.distributed import operator_locks

ZERO = Launch("zero2", world_size=2, local_world_size=2)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a build."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(operator_locks, "SECONDS_BETWEEN_LOOKS", 0.05)
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    assert FileBaton(str(lock)).try_acquire()
    return lock


def make_old(lock: Path) -> None:
    long_ago = time.time() - operator_locks.SECONDS_OF_A_BUILD - 1
    os.utime(lock, (long_ago, long_ago))


def waiting(local_rank: int) -> threading.Thread:
    """A process of a ZeRO run that starts, after one second."""
    thread = threading.Thread(target=operator_locks.wait_for_builds, args=(ZERO, local_rank), daemon=True)
    thread.start()
    thread.join(timeout=1)
    return thread


def test_a_lock_older_than_any_build_is_removed(lock: Path) -> None:
    make_old(lock)
    assert not waiting(local_rank=0).is_alive()
    assert not lock.exists()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_run_waits_for_a_young_lock_and_names_it_once(
    lock: Path, local_rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "indictune")
    thread = waiting(local_rank)
    assert thread.is_alive()
    assert lock.exists()
    assert len([message for message in caplog.messages if str(lock) in message]) == 1
    lock.unlink()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_one_rank_of_a_node_removes_a_stale_lock(lock: Path) -> None:
    make_old(lock)
    other = waiting(local_rank=1)
    assert other.is_alive()
    assert lock.exists()
    operator_locks.wait_for_builds(ZERO, local_rank=0)
    other.join(timeout=30)
    assert not other.is_alive()


def test_only_deepspeed_compiles(lock: Path) -> None:
    operator_locks.wait_for_builds(Launch("ddp", world_size=2), local_rank=0)
    assert lock.exists()


def test_upstream_waits_for_a_stale_lock(lock: Path) -> None:
    """When this fails, torch removes stale locks itself, and `indictune.distributed.operator_locks` can go."""
    make_old(lock)
    thread = threading.Thread(target=FileBaton(str(lock)).wait)
    thread.start()
    thread.join(timeout=2)
    waits = thread.is_alive()
    lock.unlink()
    thread.join(timeout=30)
    assert waits
