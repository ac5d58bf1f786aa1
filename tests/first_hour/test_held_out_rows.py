"""A run without a validation file holds out rows, and a resumed one holds out the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.runs import STEP, Job
from tests.ranks.launching import ROOT, Run

SETTINGS = """
model_name_or_path: builtin:tiny-indic-bert
train_file: {train}
max_length: 16
global_batch_size: 18
per_device_train_batch_size: 18
max_steps: 3
"""


@pytest.mark.more
def test_a_resumed_run_holds_out_the_same_rows_and_no_others(tmp_path: Path) -> None:
    lines = (ROOT / "indictune/data/samples/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    train, recipe = tmp_path / "train.jsonl", tmp_path / "job.yaml"
    train.write_text("".join(lines[:40]), encoding="utf-8")
    recipe.write_text(SETTINGS.format(train=train), encoding="utf-8")
    job = Job(recipe, tmp_path / "out")
    assert job.start(f"SIGKILL@{STEP}:3").returncode == -9
    refused = replace(job, flags=("--validation_split", "0")).start()
    assert refused.returncode == 2, refused.stderr
    assert "[resume-other-rows]" in refused.stderr
    resumed = job.start()
    assert resumed.returncode == 0, resumed.stderr
    assert "4 of 40 rows are held out" in resumed.stderr
    assert Run(job.folder).metrics["eval"]["num_examples"] == 4
