"""The schedules of pipelines, without processes."""

from __future__ import annotations

import itertools

import pytest

from indictune.distributed.pipeline.layout import SCHEDULES, Action, actions, bubble, chunks_of

SIZES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 8), (8, 24)]  # ranks and micro-batches


def simulated_bubble(schedule: str, ranks: int, micro_batches: int, backward: float = 2.0) -> float:
    """The share of waiting when ranks take their actions. A forward pass takes 1, a backward pass `backward`."""
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
        assert len(done) > before, "the ranks wait for each other"
    return 1 - sum(1 if each.is_forward else backward for each in done) / (ranks * max(free))


def _needed(action: Action, last_stage: int) -> set[Action]:
    """The passes whose results an action computes with."""
    is_forward, stage, micro_batch = action
    if is_forward:
        return {Action(True, stage - 1, micro_batch)} if stage else set()
    before = Action(False, stage + 1, micro_batch) if stage < last_stage else Action(True, stage, micro_batch)
    return {before}


def spelled(order: list[Action]) -> str:
    """F0 is the forward pass of micro-batch 0; in a later stage of the rank F0', and so on."""
    lowest = min(each.stage for each in order)
    return " ".join(
        f"{'F' if is_forward else 'B'}{micro_batch}{chr(39) * (stage > lowest)}"
        for is_forward, stage, micro_batch in order
    )


def test_gpipe_computes_all_forward_passes_first() -> None:
    assert spelled(actions("gpipe", 0, 2, 3)) == "F0 F1 F2 B0 B1 B2"
    assert spelled(actions("gpipe", 1, 2, 3)) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_keeps_as_many_micro_batches_as_there_are_stages_left() -> None:
    assert spelled(actions("1f1b", 0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert spelled(actions("1f1b", 2, 3, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert spelled(actions("1f1b", 0, 4, 2)) == "F0 F1 B0 B1"


def test_interleaved_ranks_have_two_stages() -> None:
    assert spelled(actions("interleaved", 0, 2, 2)) == "F0 F1 F0' F1' B0' B1' B0 B1"
    assert spelled(actions("interleaved", 1, 2, 2)) == "F0 F1 F0' B0' F1' B1' B0 B1"
    assert {each.stage for each in actions("interleaved", 1, 2, 2)} == {1, 3}


@pytest.mark.parametrize(("schedule", "sizes"), list(itertools.product(SCHEDULES, SIZES)))
def test_ranks_wait_as_long_as_the_formula_says(schedule: str, sizes: tuple[int, int]) -> None:
    assert simulated_bubble(schedule, *sizes) == pytest.approx(bubble(*sizes, chunks_of(schedule)))


def test_the_bubble_of_four_ranks() -> None:
    """(4-1) / (12 + 4-1), and with twice as many stages (4-1) / (24 + 4-1)."""
    assert bubble(4, 12) == 0.2
    assert bubble(4, 12, chunks=2) == pytest.approx(1 / 9)


@pytest.mark.parametrize(("schedule", "sizes"), list(itertools.product(SCHEDULES, SIZES)))
def test_messages_arrive_in_the_order_in_which_they_are_needed(schedule: str, sizes: tuple[int, int]) -> None:
    """Each direction between two ranks is a queue."""
    ranks, micro_batches = sizes
    orders = [actions(schedule, rank, ranks, micro_batches) for rank in range(ranks)]
    stages = 1 + max(each.stage for order in orders for each in order)
    for rank, is_forward in itertools.product(range(ranks), (True, False)):
        step = 1 if is_forward else -1
        sent = [each._replace(stage=each.stage + step) for each in orders[rank] if each.is_forward == is_forward]
        sent = [each for each in sent if 0 <= each.stage < stages]
        assert [each for each in orders[(rank + step) % ranks] if each in sent] == sent
