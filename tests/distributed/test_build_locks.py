"""A build that was killed does not hold up later runs."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from tests.ranks.launching import python, start

SCRIPT = "tests/distributed/loading_operators.py"


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    """What was compiled before the tests, and the locks of builds that were killed just now."""
    folder = tmp_path / "operators"
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], folder)
    for name in ("cpu_adam", "deepspeed_shm_comm"):
        assert FileBaton(str(folder / name / "lock")).try_acquire()
    return folder


@pytest.mark.skipif("TORCH_EXTENSIONS_DIR" not in os.environ, reason="`make test` names DeepSpeed's operators")
def test_a_run_waits_for_no_build_that_was_killed(operators: Path) -> None:
    result = start([*python(), SCRIPT], {"TORCH_EXTENSIONS_DIR": str(operators)}, timeout_s=60)
    assert result.returncode == 0, result.stderr
    assert list(operators.glob("*/lock")) == []


@pytest.mark.slow
def test_each_environment_has_a_folder_and_is_told_that_it_compiles(tmp_path: Path) -> None:
    """The home folder is empty. The lock of another environment is not touched."""
    foreign = tmp_path / ".cache/torch_extensions/py311_cpu/cpu_adam/lock"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    variables = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / ".cache"), "TORCH_EXTENSIONS_DIR": ""}
    result = start([*python(), SCRIPT], variables)
    assert result.returncode == 0, result.stderr
    built = list((tmp_path / ".cache/torch_extensions").glob("indictune-*/*/*.so"))
    assert sorted(path.stem for path in built) == ["cpu_adam", "deepspeed_shm_comm"]
    assert "DeepSpeed compiles cpu_adam and deepspeed_shm_comm" in result.stderr
    assert foreign.exists()


@pytest.mark.more
def test_upstream_waits_for_the_lock_of_a_build_that_was_killed(tmp_path: Path) -> None:
    """When this fails, torch looks after its locks itself, and `zero.load_operators` can go."""
    lock = tmp_path / "lock"
    assert FileBaton(str(lock)).try_acquire()
    thread = threading.Thread(target=FileBaton(str(lock)).wait)
    thread.start()
    thread.join(timeout=2)
    waits = thread.is_alive()
    lock.unlink()
    thread.join(timeout=30)
    assert waits
