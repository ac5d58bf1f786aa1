"""The order in which the ranks of a pipeline compute: lists of actions, without processes."""

from __future__ import annotations

from typing import NamedTuple

GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")
CHUNKS = 2  # stages of one rank under `interleaved`


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    is_forward: bool
    stage: int
    micro_batch: int


def chunks_of(schedule: str) -> int:
    """Stages of one rank. Rank r of p has the stages r, r + p, and so on."""
    return CHUNKS if schedule == INTERLEAVED else 1


def actions(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What one rank computes in a training step, in order.

    GPipe computes all forward passes first, and so keeps the activations of all micro-batches. 1F1B (PipeDream-Flush,
    arXiv:2006.09503) keeps at most as many as there are stages after it. The interleaved schedule (arXiv:2104.04473)
    is 1F1B with two stages a rank: half the bubble for twice the messages.

    Args:
        schedule: of `SCHEDULES`.
        rank: in the pipeline.
        ranks: of the pipeline.
        micro_batches: of the step, at least 1.
    """
    chunks = chunks_of(schedule)
    forwards = _passes(True, rank, ranks, micro_batches, chunks)
    backwards = _passes(False, rank, ranks, micro_batches, chunks)
    if schedule == GPIPE:
        return forwards + backwards
    after = ranks - rank - 1
    ahead = after if chunks == 1 else min(len(forwards), 2 * after + (chunks - 1) * ranks)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    ordered = forwards[:ahead] + [each for pair in pairs for each in pair]
    return ordered + backwards[len(forwards) - min(ahead, len(forwards)) :]


def _passes(is_forward: bool, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """All passes of one direction: as many micro-batches as there are ranks pass a chunk before the next chunk."""
    order = range(chunks) if is_forward else reversed(range(chunks))
    if chunks == 1:
        return [Action(is_forward, rank, each) for each in range(micro_batches)]
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    stages = [chunk * ranks + rank for chunk in order]
    return [Action(is_forward, stage, each) for group in groups for stage in stages for each in group]


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of a step in which a rank waits, if all stages take equally long: (p-1) / (m + p-1).

    A step of m micro-batches takes m + p-1 turns, of which each rank works m (Huang et al. 2019, GPipe, section 2).
    With v stages a rank, a turn is a v-th as long: (p-1) / (v m + p-1) (Narayanan et al. 2021, section 2.2.2).
    """
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)
