"""The demo-size run keeps the losses and gradient norms that were recorded, also after a resume.

`python -m tests.ranks.test_golden` records them anew; do so only where a change is meant to change the numbers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.ranks.launching import ROOT, Run, python, train

TRAJECTORY = ROOT / "tests/golden/trajectory.json"
STEPS = 20
STOPPED_AT = 10
FLAGS = (
    *("--config", "recipes/sentiment/demo.yaml", "--dropout", "0", "--max_steps", str(STEPS), "--logging_steps", "1"),
    *("--eval_strategy", "no", "--load_best_model_at_end", "false"),
    *("--save_strategy", "steps", "--save_steps", str(STOPPED_AT)),
)


def test_trajectory_is_the_recorded_one(tmp_path: Path) -> None:
    whole = train(python(), tmp_path / "out", *FLAGS)
    _compare(whole)

    shutil.rmtree(whole.folder / f"checkpoint-{STEPS}")
    for name in ("metrics.json", "model.safetensors"):
        (whole.folder / name).unlink()
    _compare(train(python(), whole.folder, *FLAGS, "--resume_from_checkpoint", "auto"))


def _compare(run: Run) -> None:
    for name, recorded in json.loads(TRAJECTORY.read_text(encoding="utf-8")).items():
        assert run.series(name) == pytest.approx(recorded, rel=1e-5), name


def _record() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = train(python(), Path(folder), *FLAGS)
        recorded = {name: run.series(name) for name in ("loss", "grad_norm")}
    TRAJECTORY.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
