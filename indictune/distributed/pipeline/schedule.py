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


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits, if all stages take equally long: (p-1) / (m + p-1).

    With v stages a rank, a step has v times as many passes, each a v-th as long: (p-1) / (v m + p-1).
    """
    return (ranks - 1) / (chunks_of(schedule) * micro_batches + ranks - 1)


def simulated_bubble(schedule: str, ranks: int, micro_batches: int, backward: float = 2.0) -> float:
    """`bubble`, found by letting the ranks take their actions. A forward pass takes 1, a backward pass `backward`.

    Raises:
        RuntimeError: the ranks wait for each other.
    """
    waiting = [actions(schedule, rank, ranks, micro_batches)[::-1] for rank in range(ranks)]
    free, done = [0.0] * ranks, dict[Action, float]()
    last_stage = ranks * chunks_of(schedule) - 1
    while any(waiting):
        before = len(done)
        for rank, queue in enumerate(waiting):
            while queue and (needed := _needed(queue[-1], last_stage)) <= done.keys():
                action = queue.pop()
                begin = max([free[rank], *(done[each] for each in needed)])
                free[rank] = done[action] = begin + (1 if action.is_forward else backward)
        if len(done) == before:
            raise RuntimeError(f"{schedule}: {ranks} ranks with {micro_batches} micro-batches wait for each other.")
    return 1 - sum(1 if each.is_forward else backward for each in done) / (ranks * max(free))


def _needed(action: Action, last_stage: int) -> set[Action]:
    """The passes whose results an action computes with."""
    is_forward, stage, micro_batch = action
    if is_forward:
        return {Action(True, stage - 1, micro_batch)} if stage else set()
    before = Action(False, stage + 1, micro_batch) if stage < last_stage else Action(True, stage, micro_batch)
    return {before}
