"""How long the ranks of a run wait for each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launching import accelerate, start, torchrun


def waiting(folder: Path, command: list[str], *flags: str) -> list[Any]:
    """Each group of a run that is given 777 seconds, and those that it waits."""
    given = ("--config", "recipes/sentiment/demo.yaml", "--output_dir", str(folder), "--ddp_timeout", "777")
    done = start([*command, "tests/distributed/grouping.py", *given, *flags])
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.more), "zero2"])
def test_the_timeout_is_that_of_the_run(tmp_path: Path, strategy: str) -> None:
    of_zero = [["undefined", 777.0]] if strategy == "zero2" else []
    assert waiting(tmp_path, accelerate(strategy, 2)) == [["default_pg", 777.0], *of_zero]


@pytest.mark.more
def test_the_timeout_is_that_of_the_run_after_a_restart(tmp_path: Path) -> None:
    command = [*torchrun(2), "--max-restarts", "1"]
    assert waiting(tmp_path, command, "--resume_from_checkpoint", "auto") == [["default_pg", 777.0]]


def test_a_long_wait_ends_at_once_when_a_rank_ends(tmp_path: Path) -> None:
    """Nodes with separate disks learn of each other only by it; to make the group would take 12 hours."""
    report = tmp_path / "report"
    start([*torchrun(2), "tests/distributed/long_wait.py", str(report)], timeout_s=60)
    seconds, _, error = report.read_text(encoding="utf-8").partition(" ")
    assert float(seconds) < 20
    assert "onnection" in error
