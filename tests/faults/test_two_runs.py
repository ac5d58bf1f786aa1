"""A second run in the folder of the first: a job that was submitted twice."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from indictune.checkpoint.store import UNFINISHED
from indictune.supervise.run_folder import RUN_LOCK, lock_run_folder
from tests.conftest import FinishedRun
from tests.faults.runs import Job
from tests.ranks.launching import torchrun

RANK_1_IS_FIRST = "SLOW@indictune.supervise.execute:wait_for_other_launch:1@0"


def test_it_is_refused_and_takes_nothing_away(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    written = job.folder / UNFINISHED / "checkpoint-2"
    written.mkdir(parents=True)
    with lock_run_folder(job.folder, "another launch"):
        result = job.start()
        assert result.returncode == 2, result.stderr
        assert result.stderr.splitlines()[-1] == (
            f"indictune: --output_dir {job.folder}: another run writes to it (process {os.getpid()} on "
            f"{socket.gethostname()}). Wait for its end, or use another folder. [run-folder-in-use]"
        )
        assert written.is_dir()
        assert not (job.folder / "logs").exists()
        mistyped = replace(job, flags=("--learning_rate", "fast")).start()
        assert mistyped.returncode == 2
        assert "--learning_rate fast" in mistyped.stderr
        assert not (job.folder / "status.json").exists()  # it would be taken for the first run's
    assert job.start().returncode == 0
    assert not written.exists()


@pytest.mark.slow
def test_no_rank_of_it_writes_there(finished_run: FinishedRun, tmp_path: Path) -> None:
    """Rank 1, which the launcher ends, would tell that the first run was asked to stop."""
    job = Job(finished_run.recipe, tmp_path / "out", tuple(torchrun(2)))
    job.folder.mkdir()
    with lock_run_folder(job.folder, "another launch"):
        result = job.start(RANK_1_IS_FIRST)
        assert result.returncode != 0
        assert result.stderr.count("indictune: --output_dir") == 1, result.stderr
        assert "[rank 1]" not in result.stderr
        assert [path.name for path in job.folder.iterdir()] == [RUN_LOCK]
        mistyped = replace(job, flags=("--learning_rate", "fast")).start()
        assert "--learning_rate fast" in mistyped.stderr
        assert [path.name for path in job.folder.iterdir()] == [RUN_LOCK]
    assert job.start().returncode == 0
    assert (job.folder / "logs" / "rank-1.log").exists()
