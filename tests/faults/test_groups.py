"""What happens to one rank of a tensor group or of a pipeline happens to the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FinishedRun
from tests.faults.runs import Job
from tests.faults.test_bad_numbers import assert_step_4_is_taken_back
from tests.ranks.launching import accelerate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["tp", "pipeline"])
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_both_ranks_leave_a_step_out_that_one_has_seen(
    finished_run: FinishedRun, tmp_path: Path, strategy: str, action: str
) -> None:
    """Rank 1 has the second part of each matrix, or the last stage. A step has two micro-batches."""
    every = "2" if action == "rollback" else "1"
    saves = ("--save_steps", every, "--eval_steps", every, "--save_total_limit", "20")
    job = Job(
        finished_run.recipe, tmp_path / "out", tuple(accelerate(strategy, 2)), ("--on_nonfinite", action, *saves)
    )
    result = job.start("NAN@indictune.tasks.loss:ExactLoss.__call__:7@1")
    assert result.returncode == 0, result.stderr
    assert_step_4_is_taken_back(job, tmp_path, action)
