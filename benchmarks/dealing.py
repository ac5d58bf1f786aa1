"""How rows are dealt to ranks: padding, waiting, seconds and memory, next to transformers' samplers.

    OMP_NUM_THREADS=1 python -m benchmarks.dealing

Lengths are drawn from those of the built-in tweets. For global batches of 512 rows on 8 ranks over 100,000 rows:
`padding` is its share of the computed tokens; `waiting` is how much more than the mean the busiest rank computes. A
process deals an epoch of 2M rows to one rank; the table has medians of seconds to its first micro-batch and to the
end, and of memory. The largest global batches are those of three epochs of 2M tweets of real length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from benchmarks import row_lengths
from benchmarks.contenders import peak_memory_bytes
from benchmarks.environment import environment, write_results
from benchmarks.preparation import SAMPLES
from indictune.console_text import table
from indictune.data.batching import TrainingBatches, deal_epoch
from indictune.models import builtin

RANKS, GLOBAL_BATCH = 8, 512
RANK_BATCH = GLOBAL_BATCH // RANKS
EPOCHS = 3
ROWS_OF_QUALITY, ROWS_OF_SPEED = 100_000, 2_000_000


def draw_lengths(rows: int) -> torch.Tensor:
    """Tokens of random built-in tweets, int64 [rows]."""
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-bert"))
    with SAMPLES.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    lengths = torch.tensor([len(ids) for ids in tokenizer(texts)["input_ids"]])
    return lengths[torch.randint(len(lengths), (rows,), generator=torch.Generator().manual_seed(0))]


def _slices(order: list[int], rank: int) -> Iterable[list[int]]:
    """A rank's micro-batches of an order that ranks take in turns."""
    starts = range(rank * RANK_BATCH, len(order), GLOBAL_BATCH)
    return (order[start : start + RANK_BATCH] for start in starts)


def _random(lengths: list[int], rank: int) -> Iterable[list[int]]:
    return _slices(torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist(), rank)


def _grouped(lengths: list[int], rank: int) -> Iterable[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return _slices(list(LengthGroupedSampler(RANK_BATCH, lengths=lengths, generator=generator)), rank)


def _ours(padded: bool) -> Callable[[Any, int], Iterable[list[int]]]:
    return lambda lengths, rank: TrainingBatches(lengths, GLOBAL_BATCH, 1, rank, RANKS, seed=0, padded=padded)


JOINED = "indictune, joined"
# Ours take lengths as a tensor or a list, the others a list.
SAMPLERS: dict[str, Callable[[Any, int], Iterable[list[int]]]] = {
    JOINED: _ours(padded=False),
    "indictune, padded": _ours(padded=True),
    "random": _random,
    "group_by_length": _grouped,
    "batch_rebalance": lambda lengths, rank: BatchRebalanceSampler(lengths, GLOBAL_BATCH, RANKS, 1, seed=0, rank=rank),
}


def quality(name: str, lengths: list[int]) -> dict[str, float]:
    """`padding` and `waiting` of a sampler."""
    ranks = [list(SAMPLERS[name](lengths, rank)) for rank in range(RANKS)]
    busiest = computed = real = 0
    for step in zip(*(rank[: len(lengths) // GLOBAL_BATCH] for rank in ranks), strict=True):
        of_rows = [[lengths[row] for row in rows] for rows in step]
        costs = [sum(each) if name == JOINED else len(each) * max(each) for each in of_rows]
        busiest += max(costs) * RANKS
        computed += sum(costs)
        real += sum(map(sum, of_rows))
    return {"padding": 1 - real / computed, "waiting": busiest / computed - 1}


def measure(name: str, lengths_file: Path) -> dict[str, float]:
    """Seconds and memory of a sampler, in a process forked for it."""
    numbers = torch.from_numpy(np.load(lengths_file))
    lengths = numbers if name.startswith("indictune") else numbers.tolist()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak (Linux)
    before, start = peak_memory_bytes(), time.perf_counter()
    batches = iter(SAMPLERS[name](lengths, 0))
    next(batches)
    first_s = time.perf_counter() - start
    for _ in batches:
        pass
    seconds = time.perf_counter() - start
    return {"first_s": first_s, "seconds": seconds, "memory_bytes": peak_memory_bytes() - before}


def compare(repeats: int) -> dict[str, dict[str, Any]]:
    """Measure all samplers, in turns."""
    laps: dict[str, list[dict[str, float]]] = {name: [] for name in SAMPLERS}
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(1, maxtasksperchild=1) as alone:
        lengths_file = Path(folder, "lengths.npy")
        np.save(lengths_file, draw_lengths(ROWS_OF_SPEED))
        for _ in range(repeats):
            for name, done in laps.items():
                done.append(alone.apply(measure, (name, lengths_file)))
    lengths = draw_lengths(ROWS_OF_QUALITY).tolist()
    return {
        name: {key: statistics.median(each[key] for each in done) for key in done[0]} | quality(name, lengths)
        for name, done in laps.items()
    }


def largest_batches() -> list[int]:
    """Tokens of the largest global batch of each of three epochs over 2M tweets, with the seed of the recipes."""
    lengths = torch.from_numpy(row_lengths.draw_lengths(row_lengths.TWEETS, ROWS_OF_SPEED, np.random.default_rng(0)))
    deals = (deal_epoch(lengths, GLOBAL_BATCH, 1, 42, epoch, padded=False) for epoch in range(EPOCHS))
    return [int(deal.costs.max()) for deal in deals]


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    about, results = environment(), compare(repeats)
    forms = {"padding": "{:.1%}", "waiting": "{:.2%}", "first_s": "{:.2f} s", "seconds": "{:.2f} s"}
    forms["memory_bytes"] = "{:,.0f} B"
    body = [[name, *(form.format(found[key]) for key, form in forms.items())] for name, found in results.items()]
    print(table(["sampler", "padding", "waiting", "to the first", "an epoch", "memory"], body))
    largest = largest_batches()
    print(f"largest global batches of three epochs: {largest} tokens\n")
    settings = {"ranks": RANKS, "global_batch_size": GLOBAL_BATCH, "repeats": repeats, "rows": ROWS_OF_SPEED}
    found = {"samplers": results, "largest_global_batches": largest}
    print(write_results("dealing", {"environment": about, "settings": settings, **found}))


if __name__ == "__main__":
    main()
