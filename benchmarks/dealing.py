"""How rows are dealt to ranks: padding, waiting, set-up time and memory, beside transformers' own samplers.

    OMP_NUM_THREADS=1 python -m benchmarks.dealing

Lengths are drawn from those of the built-in tweets. Of each global batch of 512 rows on 8 ranks, over 100,000 rows:
the share of padding in what is computed, and how much more than the mean the busiest rank computes, which is how long
the others wait. Time and memory are those of a process that deals an epoch of 2M rows to one rank: until its first
micro-batch, and to the end; medians of several processes, by turns. The largest global batch is that of three epochs
of 2M rows as long as `benchmarks/row_lengths.py` says tweets are. `--max_tokens_per_device` costs the search for the
smallest accumulation with which no micro-batch of three epochs has more than half of a rank's mean tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
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
from indictune.console_text import table
from indictune.data.batching import TrainingBatches, deal_epoch, smallest_accumulation
from indictune.models import builtin

SAMPLES = Path(__file__).parents[1] / "indictune/data/samples/train.jsonl"
RANKS = 8
GLOBAL_BATCH = 512
PEAK = Path("/proc/self/clear_refs")
EPOCHS = 3  # of the recipe
ROWS_OF_QUALITY = 100_000
ROWS_OF_SPEED = 2_000_000

Steps = list[list[list[int]]]  # [steps][ranks][rows]


def draw_lengths(rows: int) -> torch.Tensor:
    """Tokens of so many tweets, int64 [rows]."""
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-bert"))
    with SAMPLES.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    lengths = torch.tensor([len(ids) for ids in tokenizer(texts)["input_ids"]])
    return lengths[torch.randint(len(lengths), (rows,), generator=torch.Generator().manual_seed(0))]


def ours(lengths: Sequence[int] | torch.Tensor, rank: int, padded: bool) -> Iterable[list[int]]:
    """Micro-batches of one rank, as `--padding_free` on or off deals them."""
    return TrainingBatches(lengths, GLOBAL_BATCH, 1, rank, RANKS, seed=0, padded=padded)


def plain(lengths: list[int], rank: int) -> Iterable[list[int]]:
    """`random`: the shuffle, cut every so many rows."""
    size = GLOBAL_BATCH // RANKS
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    return (order[start : start + size] for start in range(rank * size, len(order), GLOBAL_BATCH))


def grouped(lengths: list[int], rank: int) -> Iterable[list[int]]:
    """`group_by_length`, whose batches accelerate deals to the ranks by turns."""
    size = GLOBAL_BATCH // RANKS
    generator = torch.Generator().manual_seed(0)
    order = list(LengthGroupedSampler(size, lengths=lengths, generator=generator))
    return (order[start : start + size] for start in range(rank * size, len(order), GLOBAL_BATCH))


def rebalanced(lengths: list[int], rank: int) -> Iterable[list[int]]:
    """`batch_rebalance`."""
    return BatchRebalanceSampler(lengths, GLOBAL_BATCH, RANKS, 1, seed=0, rank=rank)


# Ours take lengths as a list or a tensor, the others a list.
SAMPLERS: dict[str, Callable[[Any, int], Iterable[list[int]]]] = {
    "indictune, joined": lambda lengths, rank: ours(lengths, rank, padded=False),
    "indictune, padded": lambda lengths, rank: ours(lengths, rank, padded=True),
    "random": plain,
    "group_by_length": grouped,
    "batch_rebalance": rebalanced,
}


OURS = ("indictune, joined", "indictune, padded")


def quality(name: str, lengths: list[int]) -> dict[str, float]:
    """`padding`: share of all computed tokens; `waiting`: the busiest rank's tokens over the mean, less one."""
    ranks = [list(SAMPLERS[name](lengths, rank)) for rank in range(RANKS)]
    joined = name == "indictune, joined"
    busiest = computed = real = 0
    for step in zip(*(rank[: len(lengths) // GLOBAL_BATCH] for rank in ranks), strict=True):
        of_rows = [[lengths[row] for row in rows] for rows in step]
        costs = [sum(each) if joined else len(each) * max(each) for each in of_rows]
        busiest += max(costs) * RANKS
        computed += sum(costs)
        real += sum(map(sum, of_rows))
    return {"padding": 1 - real / computed, "waiting": busiest / computed - 1}


def measure(name: str, lengths_file: Path) -> dict[str, float]:
    """An epoch's deal to one rank, in a process that was forked for it: nothing is imported anew."""
    numbers = torch.from_numpy(np.load(lengths_file))
    lengths = numbers if name in OURS else numbers.tolist()
    PEAK.write_text("5", encoding="ascii")  # Linux forgets the peak so far
    before, start = peak_memory_bytes(), time.perf_counter()
    batches = iter(SAMPLERS[name](lengths, 0))
    next(batches)
    first = time.perf_counter() - start
    for _ in batches:
        pass
    whole = time.perf_counter() - start
    return {"first_s": first, "epoch_s": whole, "memory_bytes": peak_memory_bytes() - before}


def measure_budget(lengths_file: Path) -> dict[str, float]:
    """The search for the accumulation that a limit of tokens needs, in a process like that of `measure`."""
    lengths = torch.from_numpy(np.load(lengths_file))
    max_tokens = int(lengths.double().mean() * GLOBAL_BATCH / RANKS / 2)
    PEAK.write_text("5", encoding="ascii")
    before, start = peak_memory_bytes(), time.perf_counter()
    steps_of_run = EPOCHS * -(-len(lengths) // GLOBAL_BATCH)
    steps = smallest_accumulation(lengths, GLOBAL_BATCH, RANKS, max_tokens, seed=0, steps=steps_of_run, padded=False)
    seconds = time.perf_counter() - start
    memory = peak_memory_bytes() - before
    return {"max_tokens": max_tokens, "accumulation_steps": steps, "seconds": seconds, "memory_bytes": memory}


def compare(repeats: int) -> dict[str, dict[str, Any]]:
    """All samplers, by turns; and `token_budget`."""
    lengths = draw_lengths(ROWS_OF_QUALITY).tolist()
    laps: dict[str, list[dict[str, float]]] = {name: [] for name in SAMPLERS}
    budgets: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(1, maxtasksperchild=1) as alone:
        lengths_file = Path(folder, "lengths.npy")
        np.save(lengths_file, draw_lengths(ROWS_OF_SPEED))
        for _ in range(repeats):
            for name, done in laps.items():
                done.append(alone.apply(measure, (name, lengths_file)))
            budgets.append(alone.apply(measure_budget, (lengths_file,)))
    found = {
        name: quality(name, lengths)
        | {key: statistics.median(each[key] for each in done) for key in ("first_s", "epoch_s", "memory_bytes")}
        for name, done in laps.items()
    }
    return found | {"token_budget": {key: statistics.median(each[key] for each in budgets) for key in budgets[0]}}


def largest_batches() -> list[int]:
    """Tokens of the largest global batch of each of three epochs over 2M tweets, by the seed of the recipes."""
    lengths = torch.from_numpy(row_lengths.draw_lengths(row_lengths.TWEETS, ROWS_OF_SPEED, np.random.default_rng(0)))
    deals = (deal_epoch(lengths, GLOBAL_BATCH, 1, 42, epoch, padded=False) for epoch in range(EPOCHS))
    return [int(deal.costs.max()) for deal in deals]


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results = compare(arguments.repeats)
    budget = results.pop("token_budget")
    rows = [
        [
            name,
            f"{found['padding']:.1%}",
            f"{found['waiting']:.2%}",
            f"{found['first_s']:.2f} s",
            f"{found['epoch_s']:.2f} s",
            f"{found['memory_bytes'] / 1e6:.0f} MB",
        ]
        for name, found in results.items()
    ]
    print(table(["sampler", "padding", "waiting", "to the first", "an epoch", "memory"], rows))
    cost = f"{budget['seconds']:.2f} s and {budget['memory_bytes'] / 1e6:.0f} MB"
    steps = f"{budget['accumulation_steps']:.0f} micro-batches"
    print(f"--max_tokens_per_device {budget['max_tokens']:.0f}: {steps}, found in {cost}\n")
    largest = largest_batches()
    print(f"the largest global batch of each of three epochs: {largest} tokens\n")
    settings = {"ranks": RANKS, "global_batch_size": GLOBAL_BATCH, "repeats": arguments.repeats}
    settings |= {"rows": ROWS_OF_SPEED, "rows_of_padding_and_waiting": ROWS_OF_QUALITY}
    print(
        write_results(
            "dealing",
            {
                "environment": environment(),
                "settings": settings,
                "samplers": results,
                "token_budget": budget,
                "largest_global_batches": largest,
            },
        )
    )


if __name__ == "__main__":
    main()
