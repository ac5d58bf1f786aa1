"""Where a training step spends its time on a CPU: ours beside transformers' Trainer at its best, by kind of operation.

    python -m benchmarks.cpu_stages [--data ../shared/data/sentiment]

Models, rows and settings are those of benchmarks/speed.py, in bf16. Each contender runs alone, by turns, and who goes
first changes from round to round, and so do the rows: some steps to warm up, some that are timed, and some under
torch's profiler, of which the places that all layers compute are told: who has more of them takes longer. Of the
profiled steps everything is counted: each operation's own time, without what it calls, goes to one kind, and what is
left of the clock's time to `between operations` (Python, autograd's engine). So the kinds of a contender sum to its
step, and their differences to the difference of the steps. Shown are means over the rounds, which sum too, and of each
difference the least and the largest of a round. Steps without the profiler, which slows small operations down, are
others; they stand in the last line.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.autograd.profiler_util import FunctionEventAvg

from benchmarks.contenders import (
    BATCH_SIZE,
    Contender,
    Job,
    order_of,
    run_sentiment,
    train_by_transformers,
    write_to_log,
)
from benchmarks.environment import environment, write_results
from benchmarks.speed import (
    VOCABULARIES,
    Row,
    Runner,
    contenders,
    grouped_by_length,
    lengths_of,
    read_tweets,
    write_model,
    write_rows,
)
from benchmarks.stages import StageProfiler, Steps
from indictune.console_text import table
from indictune.data.batching import TrainingBatches

STEPS = 6
ROUNDS = 5
KEPT = 25  # operations of each run in the result file
BEST, OURS = TITLES = ("trainer_best", "ours_bf16")
BETWEEN, OTHER = "between operations", "elementwise and other"
# The first pattern that an operation's name holds decides. BERT multiplies batches of matrices in attention alone.
KINDS = {
    BETWEEN: r"^autograd::|Backward\d",
    "loader": r"DataLoader",
    "optimizer": r"Optimizer|adamw|vector_norm|foreach|clip",
    "attention": r"bmm|attention|::_(safe_)?softmax",
    "matmul": r"mm$|linear$|mkldnn",
    "dropout": r"bernoulli|dropout",
    "copies and gathers": r"copy|fill_|zero_|zeros|empty|index|gather|scatter|::cat|::stack|embedding|::to$|clone|pad",
}
Round = dict[str, dict[str, Any]]  # what was found of each contender


def kind_of(name: str) -> str:
    """The kind that an operation belongs to."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def by_kind(events: Iterable[FunctionEventAvg], steps: int, plain_s: float, profiled_s: float) -> dict[str, Any]:
    """What a run tells, in ms of a step; arguments as of `benchmarks.stages.shares`."""
    spent_ms = {str(event.key): event.self_cpu_time_total / 1e3 / steps for event in events}
    step_ms = 1e3 * profiled_s / steps
    kinds = dict.fromkeys([*KINDS, OTHER], 0.0)
    for name, ms in spent_ms.items():
        kinds[kind_of(name)] += ms
    kinds[BETWEEN] += step_ms - sum(spent_ms.values())
    longest = sorted(spent_ms, key=lambda name: spent_ms[name], reverse=True)[:KEPT]
    return {
        "step_ms": step_ms,
        "step_ms_without_profiler": 1e3 * plain_s / steps,
        "kinds": kinds,
        "operations": {name[:120]: round(spent_ms[name], 3) for name in longest},
    }


def profile(contender: Contender, job: Job, connection: Connection) -> None:
    """The whole life of a profiled process."""
    write_to_log(contender, job)
    steps = job.steps // 3
    profiler = StageProfiler(connection, Steps(steps, steps, steps), None, by_kind)
    if contender.padding is None:
        run_sentiment(contender, job, lambda *_: profiler)
    else:
        train_by_transformers(contender, job, lambda _: profiler)


def compare(rows: Sequence[Row], vocab_size: int, folder: Path, steps: int, rounds: int) -> list[Round]:
    """What the profiler found in each round, with one vocabulary."""
    model, train_file = folder / "model", write_rows(rows, folder / "train.jsonl")
    write_model(model, rows, vocab_size)
    lengths = lengths_of(model, rows)
    found = []
    for number in range(rounds):
        own = folder / f"round-{number}"
        own.mkdir()
        job = Job(model, train_file, 3 * steps, 3 * steps, own)
        grouped = grouped_by_length(model, rows, 3, steps, seed=number)
        shuffled = tuple(order_of(TrainingBatches(lengths, BATCH_SIZE, 1, 0, 1, number, padded=False), 3 * steps))
        chosen = [each for each in contenders(grouped) if each.title in TITLES]
        of_round = {}
        for each in chosen if number % 2 else reversed(chosen):
            seeded = replace(each, settings={**each.settings, "seed": number})
            of_round[each.title] = _profiled(Runner(seeded, job, profile))
            profiled = (grouped if each.title == BEST else shuffled)[-steps * BATCH_SIZE :]
            of_round[each.title]["places"] = places_of([lengths[row] for row in profiled], each.title == BEST) / steps
        found.append(of_round)
    return found


def places_of(lengths: Sequence[int], is_padded: bool) -> int:
    """That all layers compute of some batches: padded to a batch's longest, or the tokens alone."""
    if not is_padded:
        return sum(lengths)
    starts = range(0, len(lengths), BATCH_SIZE)
    return sum(BATCH_SIZE * max(lengths[start : start + BATCH_SIZE]) for start in starts)


def _profiled(runner: Runner) -> dict[str, Any]:
    """What it tells of its profiled lap, after one without the profiler."""
    runner.lap()
    runner.lap()
    found = runner.counted
    runner.finish()
    return found


def differences(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """By kind, and of the whole step: means of both contenders, of ours less the other, and its least and largest."""
    spent = [{title: {**of["kinds"], "step": of["step_ms"]} for title, of in each.items()} for each in rounds]
    plain = [{title: of["step_ms_without_profiler"] for title, of in each.items()} for each in rounds]
    columns = {name: [{title: each[title][name] for title in TITLES} for each in spent] for name in spent[0][OURS]}
    columns["step without the profiler"] = plain
    columns["places"] = [{title: of["places"] for title, of in each.items()} for each in rounds]
    found = {}
    for name, pairs in columns.items():
        less = [pair[OURS] - pair[BEST] for pair in pairs]
        means = {title: statistics.mean(pair[title] for pair in pairs) for title in TITLES}
        each = {**means, "difference": statistics.mean(less), "least": min(less), "largest": max(less)}
        found[name] = {key: round(value, 2) for key, value in each.items()}
    return found


def show(vocab_size: int, found: dict[str, dict[str, float]]) -> None:
    """Print a table, the kinds that differ the most first."""
    kinds = sorted([*KINDS, OTHER], key=lambda kind: -abs(found[kind]["difference"]))
    body = []
    for name in [*kinds, "step", "step without the profiler", "places"]:
        of = found[name]
        spread = f"{of['difference']:+.1f} ({of['least']:+.1f} to {of['largest']:+.1f})"
        body.append(
            [f"(number of {name})" if name == "places" else name, *(f"{of[title]:.1f}" for title in TITLES), spread]
        )
    header = [f"vocabulary {vocab_size:,}: ms of a step of {BATCH_SIZE} rows", *TITLES, "difference"]
    print(table(header, body), end="\n\n", flush=True)


def main() -> None:
    """Profile, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--steps", type=int, default=STEPS, help="to warm up, timed, and profiled")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    rows = read_tweets(options.data)
    results: dict[str, Any] = {"environment": environment(), "steps": options.steps, "stages": {}}
    for vocab_size in options.vocabularies:
        with tempfile.TemporaryDirectory() as work:
            rounds = compare(rows, vocab_size, Path(work), options.steps, options.rounds)
        found = differences(rounds)
        results["stages"][vocab_size] = {"differences": found, "rounds": rounds}
        show(vocab_size, found)
    print(f"written to {write_results('stages', results)}")


if __name__ == "__main__":
    main()
