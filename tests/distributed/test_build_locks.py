"""A lock that a killed build left does not hold up later runs for ever."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from indictune.distributed import zero


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a build."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    assert FileBaton(str(lock)).try_acquire()
    return lock


def make_old(lock: Path) -> None:
    long_ago = time.time() - zero.SECONDS_OF_A_BUILD - 1
    os.utime(lock, (long_ago, long_ago))


def test_a_lock_older_than_any_build_is_removed(lock: Path) -> None:
    zero.remove_stale_locks()
    assert lock.exists()
    make_old(lock)
    zero.remove_stale_locks()
    assert not lock.exists()


@pytest.mark.more
def test_upstream_waits_for_a_stale_lock(lock: Path) -> None:
    """When this fails, torch removes stale locks itself, and `indictune.distributed.zero` can go."""
    make_old(lock)
    thread = threading.Thread(target=FileBaton(str(lock)).wait)
    thread.start()
    thread.join(timeout=2)
    waits = thread.is_alive()
    lock.unlink()
    thread.join(timeout=30)
    assert waits
