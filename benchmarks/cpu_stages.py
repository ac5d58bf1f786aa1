"""Where a training step spends its time on a CPU: ours beside transformers' Trainer at its best.

    python -m benchmarks.cpu_stages [--data ../shared/data/sentiment]

Models, rows and settings are those of benchmarks/speed.py, in bf16. Each contender runs alone, by turns, five times:
some steps to warm up, some that are timed, and some under torch's profiler. Medians are shown, in ms of a step: what
the profiler counts in operations themselves, without what they call, by the operations that differ the most.
"""

from __future__ import annotations

import argparse
import os
import statistics
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
from benchmarks.stages import StageProfiler
from indictune.layout import table

STEPS = 6
RUNS = 5
SHOWN = 10
TITLES = ("trainer_best", "ours_bf16")


def profile(contender: Contender, job: Job, connection: Connection) -> None:
    """The whole life of a profiled process."""
    write_to_log(contender, job)
    profiler = StageProfiler(connection, STEPS, STEPS, None)
    if contender.padding is None:
        run_sentiment(contender, job, lambda *_: profiler)
    else:
        train_by_transformers(contender, job, lambda _: profiler)


def compare(rows: Sequence[Row], vocab_size: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the profiler found in each run, by contender, with one vocabulary."""
    model, train_file = folder / "model", write_rows(rows, folder / "train.jsonl")
    write_model(model, rows, vocab_size)
    grouped = grouped_by_length(model, rows, 3, STEPS)
    chosen = [each for each in contenders(grouped) if each.title in TITLES]
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in TITLES}
    for run in range(RUNS):
        own = folder / f"run-{run}"
        own.mkdir()
        job = Job(model, train_file, 3 * STEPS, 3 * STEPS, own)
        for each in chosen:
            found[each.title].append(Runner(each, job, profile).finish())
    return found


def ms_by_operation(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over runs; 0 where an operation is not among the longest of a run."""
    spent = [{each["name"]: each["ms_of_step"] for each in run["top_kernels"]} for run in runs]
    return {name: statistics.median(one.get(name, 0.0) for one in spent) for name in set().union(*spent)}


def show(vocab_size: int, found: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table: milliseconds of a step, by operation."""
    spent = {title: ms_by_operation(runs) for title, runs in found.items()}
    best, ours = (spent[title] for title in TITLES)
    differences = {name: ours.get(name, 0.0) - best.get(name, 0.0) for name in {*best, *ours}}
    names = sorted(differences, key=lambda name: abs(differences[name]), reverse=True)[:SHOWN]
    body = [[name, *(f"{each.get(name, 0.0):.1f}" for each in (best, ours))] for name in names]
    for title, key in (("all operations", "busy_ms_of_step"), ("the step, without the profiler", "step_ms")):
        body.append([title, *(f"{statistics.median(run[key] for run in found[each]):.1f}" for each in TITLES)])
    header = [f"vocabulary {vocab_size:,}: ms of a step of {BATCH_SIZE} rows", *TITLES]
    print(table(header, body), end="\n\n", flush=True)


def main() -> None:
    """Profile, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    rows = read_tweets(options.data)
    results: dict[str, Any] = {"environment": environment(), "steps": STEPS, "runs": RUNS, "stages": {}}
    for vocab_size in VOCABULARIES:
        with tempfile.TemporaryDirectory() as work:
            results["stages"][vocab_size] = compare(rows, vocab_size, Path(work))
        show(vocab_size, results["stages"][vocab_size])
    print(f"written to {write_results('stages', results)}")


if __name__ == "__main__":
    main()
