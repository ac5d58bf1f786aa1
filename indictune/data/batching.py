"""Assign rows to batches and ranks: pure functions of lengths, seed, epoch and world size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

# In a micro-batch without rows: the collator replaces it by a dummy row that does not count.
NO_ROW = -1
ROWS_AT_ONCE = 2**18  # dealt together; each takes a hundred bytes

MicroBatch = list[int]


def lengths_of(dataset: Any, padded: bool = False) -> torch.Tensor:
    """Tokens of each row of a tokenised dataset, int64 [rows].

    A pair of answers has those of both conversations. With `padded`, the shorter one is padded to the longer.
    """
    if padded and "chosen_length" in dataset.column_names:
        return 2 * lengths_of_sides(dataset).amax(0)
    return torch.tensor(dataset.with_format("arrow")[:]["length"].to_numpy(), dtype=torch.int64)


def lengths_of_sides(dataset: Any) -> torch.Tensor:
    """Tokens of both conversations of each pair of answers, int64 [2, pairs]."""
    chosen = torch.tensor(dataset.with_format("arrow")[:]["chosen_length"].to_numpy(), dtype=torch.int64)
    return torch.stack([chosen, lengths_of(dataset) - chosen])


def deal_by_tokens(lengths: torch.Tensor, parts: int) -> torch.Tensor:
    """Deal the rows of each batch to `parts` micro-batches of nearly the same number of tokens.

    The longest row goes first, and each row to the part with the fewest tokens so far (Graham's longest processing
    time rule, SIAM J. Appl. Math. 17(2), 1969): no part has more than a `parts`-th of the tokens and one row.

    `lengths` are [batches, rows], each batch's in falling order. Returns the part of each row, int64 [batches, rows].
    """
    part_of = torch.zeros_like(lengths, dtype=torch.int64)
    if parts == 1:
        return part_of
    tokens = lengths.new_zeros(len(lengths), parts)
    for row in range(lengths.shape[1]):
        lightest = tokens.argmin(1, keepdim=True)
        tokens.scatter_add_(1, lightest, lengths[:, row : row + 1])
        part_of[:, row : row + 1] = lightest
    return part_of


def deal_by_length(lengths: torch.Tensor, parts: int) -> torch.Tensor:
    """Deal the rows of each batch to `parts` micro-batches of rows of like length, for models that need padding.

    Each part is a run of the rows in falling order. No other cut has a largest part of fewer tokens, padding included.
    Arguments and result are those of `deal_by_tokens`.
    """
    batches, rows = lengths.shape
    low, high = lengths[:, 0].clone(), lengths[:, 0] * rows
    while bool((low < high).any()):
        middle = (low + high) // 2
        fits = _ends_of_runs(lengths, middle, parts)[:, -1] == rows
        low, high = torch.where(fits, low, middle + 1), torch.where(fits, middle, high)
    ends = _ends_of_runs(lengths, high, parts)
    numbers = torch.arange(rows).expand(batches, rows).contiguous()
    return torch.searchsorted(ends, numbers, right=True)


def _ends_of_runs(lengths: torch.Tensor, most: torch.Tensor, parts: int) -> torch.Tensor:
    """Where each part ends when it takes as many rows as fit into `most` tokens, int64 [batches, parts]."""
    rows = lengths.shape[1]
    ends = torch.zeros(len(lengths), parts, dtype=torch.int64)
    end = ends[:, 0]
    for part in range(parts):
        longest = lengths.gather(1, end.clamp(max=rows - 1)[:, None])[:, 0]
        end = (end + most // longest.clamp(min=1)).clamp(max=rows)
        ends[:, part] = end
    return ends


@dataclass(frozen=True)
class Deal:
    """How the rows of one epoch are dealt.

    Attributes:
        rows: their numbers, micro-batch after micro-batch, longest first within each; int32 [rows].
        ends: number of rows up to the end of each micro-batch, int64 [micro-batches].
        costs: tokens that each micro-batch computes, padding included, int64 [micro-batches].
    """

    rows: torch.Tensor
    ends: torch.Tensor
    costs: torch.Tensor


def deal_epoch(lengths: torch.Tensor, global_batch_size: int, parts: int, seed: int, epoch: int, padded: bool) -> Deal:
    """Shuffle the rows, cut them into global batches, and deal each to `parts` micro-batches.

    The rows of global batch `s` are those of the plain shuffled recipe at any number of parts: from
    `s * global_batch_size` onwards in the epoch's shuffle. The last one may have fewer.

    Args:
        lengths: tokens of each row, int64 [rows].
        global_batch_size: rows of one optimizer step.
        parts: micro-batches of a global batch, over all ranks.
        seed: of the shuffle.
        epoch: from 0; each has its own shuffle.
        padded: whether rows are padded to the longest of their micro-batch.
    """
    pieces = _pieces(_shuffled(len(lengths), seed, epoch), global_batch_size)
    dealt = [_deal(each, lengths, parts, padded) for each in pieces]
    rows, counts, costs = (torch.cat(of_pieces) for of_pieces in zip(*dealt, strict=True))
    return Deal(rows, counts.cumsum(0), costs)


def _shuffled(rows: int, seed: int, epoch: int) -> torch.Tensor:
    """The rows' numbers in the order of an epoch, int64 [rows]."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed + epoch))


def _pieces(order: torch.Tensor, global_batch_size: int) -> Iterator[torch.Tensor]:
    """Global batches of rows in this order, many at a time, each [batches, rows]; a smaller last one alone."""
    whole = len(order) // global_batch_size * global_batch_size
    if whole:
        yield from torch.split(order[:whole].view(-1, global_batch_size), max(1, ROWS_AT_ONCE // global_batch_size))
    if whole < len(order):
        yield order[whole:][None]


def _deal(batches: torch.Tensor, lengths: torch.Tensor, parts: int, padded: bool) -> tuple[torch.Tensor, ...]:
    """The rows of batches [batches, rows] in the order of their micro-batches, the rows and the tokens of each."""
    sorted_lengths, order = lengths[batches].sort(dim=1, descending=True, stable=True)
    part_of = (deal_by_length if padded else deal_by_tokens)(sorted_lengths, parts)
    by_part = part_of.argsort(dim=1, stable=True)
    rows = batches.gather(1, order.gather(1, by_part)).to(torch.int32)
    nothing = torch.zeros(len(batches), parts, dtype=torch.int64)
    counts = nothing.scatter_add(1, part_of, torch.ones_like(part_of))
    if padded:
        costs = counts * nothing.scatter_reduce(1, part_of, sorted_lengths, "amax")
    else:
        costs = nothing.scatter_add(1, part_of, sorted_lengths)
    return rows.flatten(), counts.flatten(), costs.flatten()


def smallest_accumulation(
    lengths: torch.Tensor,
    global_batch_size: int,
    world_size: int,
    max_tokens: int,
    seed: int,
    steps: int,
    padded: bool,
) -> int:
    """The smallest accumulation with which no micro-batch of a run has more than `max_tokens` tokens.

    A batch that fits into some micro-batches fits into more: with one part more, no part of either deal grows.
    `max_tokens` counts padding, and no row is longer. The other arguments are those of `deal_epoch`.
    """
    steps_per_epoch = -(-len(lengths) // global_batch_size)
    fewest = 1
    for epoch in range(-(-steps // steps_per_epoch)):
        remaining = (steps - epoch * steps_per_epoch) * global_batch_size  # the last epoch may be partial
        for batches in _pieces(_shuffled(len(lengths), seed, epoch)[:remaining], global_batch_size):
            largest = int(lengths[batches].sum(1).max())
            fewest = max(fewest, -(-largest // (world_size * max_tokens)))
            while _deal(batches, lengths, fewest * world_size, padded)[2].max() > max_tokens:
                fewest += 1
    return fewest


class TrainingBatches(Sampler[MicroBatch]):
    """The micro-batches of one rank, epoch by epoch.

    Each row comes exactly once an epoch, in the global batch that `deal_epoch` chooses. Every global batch has world
    size x accumulation micro-batches, even with fewer rows, so every rank takes part in every collective. Arguments
    are those of `deal_epoch`; `accumulation_steps` are micro-batches of one rank in an optimizer step. `tokens` are
    those of each row without its own padding, int64 [rows]; None if it has none.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        global_batch_size: int,
        accumulation_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        padded: bool = True,
        tokens: torch.Tensor | None = None,
    ) -> None:
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self.tokens = self.lengths if tokens is None else tokens
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.padded = padded
        self.epoch = 0
        self._latest: tuple[int, Deal] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-len(self.lengths) // self.global_batch_size)

    def __len__(self) -> int:
        """Micro-batches of one rank in one epoch."""
        return self.steps_per_epoch * self.accumulation_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        deal = self._deal(self.epoch)
        for number in range(self.rank, len(deal.ends), self.world_size):
            yield _micro_batch(deal, number)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass."""
        self.epoch = epoch

    def micro_batches(self, epoch: int, step: int) -> list[MicroBatch]:
        """All micro-batches, of all ranks, of one optimizer step of an epoch."""
        deal = self._deal(epoch)
        return [_micro_batch(deal, number) for number in self._numbers(step)]

    def counts(self, epoch: int, step: int) -> tuple[int, int, int]:
        """Rows, tokens, and tokens with padding of one optimizer step of an epoch, over all ranks."""
        deal = self._deal(epoch)
        numbers = self._numbers(step)
        before = deal.ends[numbers.start - 1] if numbers.start else 0
        rows = deal.rows[before : deal.ends[numbers.stop - 1]]
        costs = deal.costs[numbers.start : numbers.stop]
        return len(rows), int(self.tokens[rows].sum()), int(costs.sum())

    def _numbers(self, step: int) -> range:
        parts = self.accumulation_steps * self.world_size
        return range(step * parts, (step + 1) * parts)

    def _deal(self, epoch: int) -> Deal:
        """The epoch's deal. The latest is cached, because every step needs it."""
        if self._latest is None or self._latest[0] != epoch:
            parts = self.accumulation_steps * self.world_size
            deal = deal_epoch(self.lengths, self.global_batch_size, parts, self.seed, epoch, self.padded)
            self._latest = epoch, deal
        return self._latest[1]


def _micro_batch(deal: Deal, number: int) -> MicroBatch:
    start = deal.ends[number - 1] if number else 0
    rows: MicroBatch = deal.rows[start : deal.ends[number]].tolist()
    return rows or [NO_ROW]


class EvaluationBatches(Sampler[MicroBatch]):
    """The evaluation batches of one rank: each row once over all ranks, rows of like length together.

    At each step every rank gets a batch of the same number of rows, because results are gathered step by step. Where
    rows run out, it is filled with `NO_ROW`. `batch_size` is the number of rows of a batch on one rank.
    """

    def __init__(self, lengths: Sequence[int] | torch.Tensor, batch_size: int, rank: int, world_size: int) -> None:
        self.rows_by_length = torch.as_tensor(lengths).argsort(descending=True, stable=True).tolist()
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-len(self.rows_by_length) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        rows_at_once = self.batch_size * self.world_size
        for start in range(0, len(self.rows_by_length), rows_at_once):
            rows = self.rows_by_length[start : start + rows_at_once]
            rows_per_rank = -(-len(rows) // self.world_size)
            mine = rows[self.rank * rows_per_rank : (self.rank + 1) * rows_per_rank]
            yield mine + [NO_ROW] * (rows_per_rank - len(mine))
