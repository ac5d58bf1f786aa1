"""Memory over a long run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import FinishedRun
from tests.distributed.launching import SCRIPT, python, start

BYTES_PER_STEP = 1000


@pytest.mark.slow
def test_a_long_run_holds_no_more_memory_than_a_short_one(finished_run: FinishedRun, tmp_path: Path) -> None:
    """500 epochs; what is logged, every tenth step, stays in memory."""
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(tmp_path / "out"), "--max_steps", "2500"]
    flags += ["--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    notes = tmp_path / "memory"
    variables = {"MEMORY": str(notes)}
    result = start([*python(), "tests/faults/growing.py", SCRIPT, *flags, "--logging_steps", "10"], variables, 580)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    held = {line["step"]: line["bytes"] for line in lines}
    print(held)
    assert held[2500] - held[500] < 2000 * BYTES_PER_STEP, held
