"""One small finished run, which many tests look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.launching import ROOT, SCRIPT, Run, python, start


@dataclass(frozen=True)
class FinishedRun(Run):
    """A finished run, and what it said on the console."""

    recipe: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """30 training rows in batches of 8 over two epochs: 8 steps. Line 31 has no text, line 32 is a validation row."""
    folder = tmp_path_factory.mktemp("finished")
    rows = {
        split: (ROOT / f"indictune/data/samples/{split}.jsonl").read_text(encoding="utf-8").splitlines()[:number]
        for split, number in (("train", 30), ("validation", 13), ("test", 11))
    }
    empty = json.dumps({"text": " ", "label": "neutral", "language": "hi", "script": "Deva"})
    rows["train"] += [empty, rows["validation"][0]]
    recipe = folder / "job.yaml"
    lines = [
        "model_name_or_path: builtin:tiny-indic-bert",
        "max_length: 32",
        "global_batch_size: 8",
        "per_device_train_batch_size: 4",
        "per_device_eval_batch_size: 4",
        "num_train_epochs: 2",
        "learning_rate: 1e-4",
        "logging_steps: 2",
    ]
    for split, texts in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        lines.append(f"{split}_file: {json.dumps(str(folder / f'{split}.jsonl'))}")
    recipe.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result = start([*python(), SCRIPT, "--config", str(recipe), "--output_dir", str(folder / "out")])
    assert result.returncode == 0, result.stderr
    return FinishedRun(folder / "out", recipe, result.stdout, result.stderr)
