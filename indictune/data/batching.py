"""Which rows form which batch on which rank: pure functions of (rows, seed, epoch, world size)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

# Stands in a micro-batch that has no row of its own: the collator makes a row of it that nobody counts.
NO_ROW = -1

MicroBatch = list[int]


def split_evenly(rows: Sequence[int], parts: int) -> list[MicroBatch]:
    """Cut `rows` into `parts` runs whose lengths differ by at most one; a part without rows gets `NO_ROW`.

    `split_evenly([5, 6, 7], 2)` is `[[5, 6], [7]]`; `split_evenly([5], 2)` is `[[5], [NO_ROW]]`.
    """
    quotient, remainder = divmod(len(rows), parts)
    runs = []
    start = 0
    for part in range(parts):
        end = start + quotient + (part < remainder)
        runs.append(list(rows[start:end]) or [NO_ROW])
        start = end
    return runs


class TrainingBatches(Sampler[MicroBatch]):
    """The micro-batches of one rank, epoch by epoch.

    The rows of global batch `s` in epoch `e` are the same at any world size and any split: those from
    `s * global_batch_size` onwards in the epoch's shuffle. Each row comes exactly once an epoch. The last global batch
    may have fewer rows; it is still cut into world size x accumulation micro-batches, so that every rank takes part
    in every collective.

    Args:
        num_rows: rows of the dataset.
        global_batch_size: rows of one optimizer step over all ranks.
        accumulation_steps: micro-batches a rank and optimizer step.
        rank: of this process.
        world_size: number of processes.
        seed: of the shuffle.
    """

    def __init__(
        self, num_rows: int, global_batch_size: int, accumulation_steps: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.num_rows = num_rows
        self.global_batch_size = global_batch_size
        self.accumulation_steps = accumulation_steps
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self._shuffle: tuple[int, list[int]] = (-1, [])

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.num_rows // self.global_batch_size)

    def __len__(self) -> int:
        """Micro-batches of one rank in one epoch."""
        return self.steps_per_epoch * self.accumulation_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        order = self._order(self.epoch)
        for step in range(self.steps_per_epoch):
            for micro_batches in self._deal(order, step):
                yield micro_batches[self.rank]

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the next pass."""
        self.epoch = epoch

    def micro_batches(self, epoch: int, step: int) -> list[MicroBatch]:
        """All micro-batches, of all ranks, of one optimizer step of an epoch."""
        return [micro_batch for dealt in self._deal(self._order(epoch), step) for micro_batch in dealt]

    def _order(self, epoch: int) -> list[int]:
        """The epoch's shuffle of all rows; the latest is kept, because every step asks for it."""
        if self._shuffle[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._shuffle = (epoch, torch.randperm(self.num_rows, generator=generator).tolist())
        return self._shuffle[1]

    def _deal(self, order: Sequence[int], step: int) -> list[list[MicroBatch]]:
        """The micro-batches of global batch `step`, as [accumulation_steps][world_size]."""
        rows = order[step * self.global_batch_size : (step + 1) * self.global_batch_size]
        parts = split_evenly(rows, self.accumulation_steps * self.world_size)
        return [parts[start : start + self.world_size] for start in range(0, len(parts), self.world_size)]


class EvaluationBatches(Sampler[MicroBatch]):
    """The evaluation batches of one rank: each row once over all ranks, rows of like length together.

    Every rank gets the same number of batches, and at each step batches of the same number of rows, padded with
    `NO_ROW` where rows run out, because results are gathered step by step.

    Args:
        lengths: tokens of each row.
        batch_size: rows of a batch on one rank.
        rank: of this process.
        world_size: number of processes.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, rank: int, world_size: int) -> None:
        self.rows_by_length = torch.tensor(lengths).argsort(descending=True, stable=True).tolist()
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
