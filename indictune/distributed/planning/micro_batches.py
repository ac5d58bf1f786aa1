"""The micro-batches into which a step can be cut, and the tokens of each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from indictune.config.plan import AnyPlan


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the training rows.

    Attributes:
        mean: tokens of a row.
        longest: tokens of one.
        attended: tokens that a token attends to, on average: those of its text. Rows that are packed have several.
        rows: of an epoch; 0 for unknown.
    """

    mean: float
    longest: int
    attended: float
    rows: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """What a process computes at once.

    Attributes:
        rows: of it.
        tokens: at most, of one process.
        count: of a step.
    """

    rows: int
    tokens: int
    count: int


def unknown_lengths(plan: AnyPlan) -> RowLengths:
    """Of rows that are not read: each has `--max_length` tokens."""
    return RowLengths(plan.sequence_limit, plan.sequence_limit, plan.sequence_limit)


def micro_batches(plan: AnyPlan, lengths: RowLengths, asked: int | None = None) -> list[MicroBatch]:
    """All micro-batches that a run may choose; none if its processes cannot share the global batch.

    Args:
        plan: of the run, with its launch.
        lengths: of the training rows.
        asked: the only one that is wanted, in rows, or in tokens under `--max_tokens_per_device`.
    """
    rows, rest = divmod(plan.training.global_batch_size, plan.launch.data_size)
    if rest:
        return []
    parts = plan.launch.axes.context
    if plan.training.max_tokens_per_device is not None:
        return [_of_tokens(rows, lengths, each, parts) for each in _limits(rows, lengths, parts, asked)]
    sizes = [each for each in range(1, rows + 1) if rows % each == 0 and asked in (None, each)]
    return [MicroBatch(each, math.ceil(each * lengths.longest / parts), rows // each) for each in sizes]


def _limits(rows: int, lengths: RowLengths, parts: int, asked: int | None) -> list[int]:
    """Values of `--max_tokens_per_device`: the longest row's, doubled until one micro-batch takes all rows."""
    if asked is not None:
        return [asked]
    least = math.ceil(lengths.longest / parts)
    doublings = max(0, math.ceil(math.log2(max(1.0, rows * lengths.mean / lengths.longest))))
    return [least * 2**power for power in range(doublings + 1)]


def _of_tokens(rows: int, lengths: RowLengths, limit: int, parts: int) -> MicroBatch:
    count = min(rows, math.ceil(rows * lengths.mean / (limit * parts)))
    return MicroBatch(math.ceil(rows / count), limit, count)
