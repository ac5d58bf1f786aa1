"""One small job for all strategies: ragged global batches, more than two epochs, no dropout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launching import ROOT, SCRIPT, Run, accelerate, python, train

SAMPLES = ROOT / "indictune/data/samples"

# The learning rate of step 1 is 0, so that the checkpoint of step 1 holds the weights that the run started from.
JOB = """
model_name_or_path: builtin:tiny-indic-bert
dropout: 0
max_length: 48
global_batch_size: 24
per_device_train_batch_size: 6
per_device_eval_batch_size: 8
max_steps: 12
learning_rate: 1e-4
lr_scheduler_type: constant_with_warmup
warmup_steps: 1
logging_steps: 1
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: steps
save_steps: 1
save_total_limit: 20
"""


def _head(source: Path, rows: int, target: Path) -> Path:
    with source.open(encoding="utf-8") as lines:
        target.write_text("".join(itertools.islice(lines, rows)), encoding="utf-8")
    return target


def write_job(folder: Path) -> Path:
    """A recipe: 101 rows make 5 global batches of 24 an epoch, the last of them with 5 rows."""
    train_file = _head(SAMPLES / "train.jsonl", 101, folder / "train.jsonl")
    validation_file = _head(SAMPLES / "validation.jsonl", 53, folder / "validation.jsonl")
    recipe = folder / "job.yaml"
    files = {"train_file": str(train_file), "validation_file": str(validation_file)}
    recipe.write_text(JOB + "".join(f"{key}: {json.dumps(value)}\n" for key, value in files.items()), encoding="utf-8")
    return recipe


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`write_job` in a folder of its own."""
    return write_job(tmp_path_factory.mktemp("job"))


def starter(job: Path, factory: pytest.TempPathFactory, script: str = SCRIPT) -> Callable[..., Run]:
    """Trains a job under a strategy with some flags; the same call gives the same run."""
    done: dict[tuple[object, ...], Run] = {}

    def run(strategy: str | Path, ranks: int, *flags: str) -> Run:
        key = (strategy, ranks, *flags)
        if key not in done:
            command = python() if strategy == "single" else accelerate(strategy, ranks)
            folder = factory.mktemp(Path(strategy).stem)
            done[key] = train(command, folder, "--config", str(job), *flags, script=script)
        return done[key]

    return run


@pytest.fixture(scope="session")
def run_under(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`starter` of the job."""
    return starter(job, tmp_path_factory)
