"""Where a training step spends its time on a CPU: ours beside transformers' Trainer at its best.

    python -m benchmarks.cpu_stages [--data ../shared/data/sentiment]

Models, rows and settings are those of benchmarks/speed.py, in bf16. Each contender runs alone: some steps to warm up,
some that are timed, and some under torch's profiler. The shares are of the time that the profiler counts in
operations themselves, without what they call.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.contenders import BATCH_SIZE, Contender, Job, run_sentiment, train_by_transformers, write_to_log
from benchmarks.environment import environment, write_results
from benchmarks.speed import (
    VOCABULARIES,
    Row,
    Runner,
    contenders,
    grouped_by_length,
    read_tweets,
    write_model,
    write_rows,
)
from benchmarks.stages import STAGES, StageProfiler
from indictune.layout import table

STEPS = 6
TITLES = ("trainer_best", "ours_bf16")


def profile(contender: Contender, job: Job, connection: Connection) -> None:
    """The whole life of a profiled process."""
    write_to_log(contender, job)
    profiler = StageProfiler(connection, STEPS, STEPS, None)
    if contender.padding is None:
        run_sentiment(contender, job, lambda *_: profiler)
    else:
        train_by_transformers(contender, job, lambda _: profiler)


def compare(rows: Sequence[Row], vocab_size: int, folder: Path) -> dict[str, Any]:
    """What the profiler found, by contender, with one vocabulary."""
    model, train_file = folder / "model", write_rows(rows, folder / "train.jsonl")
    write_model(model, rows, vocab_size)
    job = Job(model, train_file, 3 * STEPS, 3 * STEPS, folder)
    grouped = grouped_by_length(model, rows, 3, STEPS)
    chosen = [each for each in contenders(grouped) if each.title in TITLES]
    return {each.title: Runner(each, job, profile).finish() for each in chosen}


def show(vocab_size: int, found: dict[str, Any]) -> None:
    """Print a table: milliseconds of a step, by stage."""
    header = [f"vocabulary {vocab_size:,}: ms of a step of {BATCH_SIZE} rows", *TITLES]
    spent = {title: found[title]["share_of_busy_time"] for title in TITLES}
    body = [
        [stage, *(f"{spent[title][stage] * found[title]['busy_ms_of_step']:.1f}" for title in TITLES)]
        for stage in (*STAGES, "rest")
    ]
    body.append(
        ["between operations", *(f"{found[each]['idle_share'] * found[each]['step_ms']:.1f}" for each in TITLES)]
    )
    body.append(["all, without the profiler", *(f"{found[title]['step_ms']:.1f}" for title in TITLES)])
    print(table(header, body), end="\n\n", flush=True)


def main() -> None:
    """Profile, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    rows = read_tweets(options.data)
    results: dict[str, Any] = {"environment": environment(), "steps": STEPS, "stages": {}}
    for vocab_size in VOCABULARIES:
        with tempfile.TemporaryDirectory() as work:
            results["stages"][vocab_size] = compare(rows, vocab_size, Path(work))
        show(vocab_size, results["stages"][vocab_size])
    print(f"written to {write_results('stages', results)}")


if __name__ == "__main__":
    main()
