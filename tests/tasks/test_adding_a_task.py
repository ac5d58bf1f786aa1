"""The walk of docs/adding_a_task.md: its file and a copied script train a task."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from tests.ranks.launching import ROOT, Run, python, start

STEPS = ["--max_steps", "12", "--global_batch_size", "8", "--per_device_train_batch_size", "8", "--dropout", "0"]
RATE = ["--learning_rate", "3e-3", "--lr_scheduler_type", "constant", "--logging_steps", "1", "--max_length", "32"]


def test_the_file_and_a_copied_script_train_the_task(tmp_path: Path) -> None:
    page = (ROOT / "docs/adding_a_task.md").read_text(encoding="utf-8")
    (file,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "masked.py").write_text(file, encoding="utf-8")
    script = (ROOT / "scripts/train_tokens.py").read_text(encoding="utf-8")
    script = script.replace("indictune.tasks.tokens", "masked").replace("TokenClassification", "MaskedTexts")
    (tmp_path / "train_masked.py").write_text(script, encoding="utf-8")
    for split, rows in (("train", 16), ("validation", 8)):
        (tmp_path / f"{split}.txt").write_text("the film was good\nयह फिल्म अच्छी थी\n" * rows, encoding="utf-8")
    files = [f"--{split}_file={tmp_path / split}.txt" for split in ("train", "validation")]
    command = [*python(), str(tmp_path / "train_masked.py"), *files, *STEPS, *RATE]
    result = start([*command, "--output_dir", str(tmp_path / "out")], {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert result.returncode == 0, result.stderr
    run = Run(tmp_path / "out")
    assert run.log[-1]["loss"] < run.log[0]["loss"]
    scores = run.metrics["eval"]
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]), rel=1e-5)
    assert set(scores["per_language"]) == {"hi", "en"}
