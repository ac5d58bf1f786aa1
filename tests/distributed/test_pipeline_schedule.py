"""The schedules of pipelines, without processes."""

from __future__ import annotations

import itertools

import pytest

from indictune.distributed.pipeline.schedule import SCHEDULES, Action, actions, bubble, simulated_bubble

SIZES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 8), (8, 24)]  # ranks and micro-batches


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
    assert simulated_bubble(schedule, *sizes) == pytest.approx(bubble(schedule, *sizes))


def test_the_bubble_of_four_ranks() -> None:
    """(4-1) / (12 + 4-1), and with twice as many stages (4-1) / (24 + 4-1)."""
    assert bubble("1f1b", 4, 12) == 0.2
    assert bubble("interleaved", 4, 12) == pytest.approx(1 / 9)


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
