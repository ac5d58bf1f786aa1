"""One whole epoch of two million rows, by the recipe and the commands that a user types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.classifier_gpu import RECIPE, SIZES, write_rows
from benchmarks.timed_parts import Note, Plan

ROOT = Path(__file__).parents[1]
SCRIPT = "scripts/train_sentiment.py"


def measure(plan: Plan, note: Note) -> None:
    """Part: seconds of `indictune prepare`, then of the training script on the prepared rows.

    `process_s` is the whole process; `train.runtime_s` is training with its checkpoint. There are no validation rows.
    """
    size = SIZES[plan.size]
    folder = plan.folder / "epoch"
    folder.mkdir()
    rows, output, log = folder / "train.jsonl", folder / "run", folder / "log"
    lengths = write_rows(rows, size, size.rows_of_epoch)
    note({"rows": len(lengths), "tokens_per_row": round(float(lengths.mean()), 2)})
    flags = ["--config", str(RECIPE), "--model_name_or_path", str(plan.folder / "model"), "--train_file", str(rows)]
    flags += ["--global_batch_size", str(size.global_batch_size), "--num_train_epochs", "1", "--validation_split", "0"]
    preparation_s = _run(["-m", "indictune", "prepare", *flags], folder, log)
    note({"preparation_s": preparation_s})
    process_s = _run([SCRIPT, *flags, "--output_dir", str(output)], folder, log)
    train = json.loads((output / "metrics.json").read_text(encoding="utf-8"))["train"]
    note({"process_s": process_s, "train": train})
    print(f"\none epoch of {len(lengths):,} rows, prepared in {preparation_s} s before:", end=" ")
    print(f"{train['runtime_s']:.1f} s of training, in a process of {process_s} s", flush=True)


def _run(words: list[str], folder: Path, log: Path) -> float:
    """Run a Python process with its cache in a folder and its output in a log; return its seconds."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"INDICTUNE_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    since = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, **variables}, stdout=file, stderr=file, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{words} failed:\n{log.read_text(encoding='utf-8', errors='replace')}")
    return round(time.perf_counter() - since, 1)
