"""One global batch split into processes, micro-batches and accumulation."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indictune.errors import UserError
from indictune.strategy.batch import accumulation_steps


@pytest.mark.parametrize(
    ("global_batch", "per_device", "world", "expected"),
    [(64, 64, 1, 1), (64, 8, 1, 8), (64, 8, 8, 1), (64, 8, 4, 2), (6, 1, 3, 2), (1, 1, 1, 1)],
)
def test_accumulation_fills_the_global_batch(global_batch: int, per_device: int, world: int, expected: int) -> None:
    assert accumulation_steps(global_batch, per_device, world) == expected


def message(global_batch: int, per_device: int, world: int) -> str:
    with pytest.raises(UserError) as raised:
        accumulation_steps(global_batch, per_device, world)
    return raised.value.message


def test_the_message_says_which_sizes_fit() -> None:
    assert message(48, 16, 2) == (
        "--global_batch_size 48 is no multiple of world size 2 x --per_device_train_batch_size 16 = 32. "
        "What fits: --global_batch_size 32 or 64; or --per_device_train_batch_size 1, 2, 3, 4, 6, 8, 12, 24."
    )


def test_a_global_batch_below_the_world_size_has_no_per_device_batch_that_fits() -> None:
    assert message(3, 2, 4) == (
        "--global_batch_size 3 is no multiple of world size 4 x --per_device_train_batch_size 2 = 8. "
        "What fits: --global_batch_size 8."
    )


def test_sizes_below_one_are_refused_together() -> None:
    assert message(0, -1, 2) == (
        "2 problems:\n  1. --global_batch_size 0: expected at least 1 row.\n"
        "  2. --per_device_train_batch_size -1: expected at least 1 row."
    )


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 16))
def test_every_split_is_exact_or_refused_with_sizes_that_are_accepted(
    global_batch: int, per_device: int, world: int
) -> None:
    try:
        steps = accumulation_steps(global_batch, per_device, world)
    except UserError as error:
        ways_out = error.message.partition("What fits: ")[2]
        globals_text, _, per_device_text = ways_out.partition("; or ")
        globals_that_fit = [int(size) for size in re.findall(r"\d+", globals_text)]
        per_device_that_fit = [int(size) for size in re.findall(r"\d+", per_device_text)]
        assert 1 <= len(globals_that_fit) <= 2
        assert bool(per_device_that_fit) == (global_batch % world == 0)
        for size in globals_that_fit:
            assert accumulation_steps(size, per_device, world) * per_device * world == size
            assert abs(size - global_batch) < per_device * world
        for size in per_device_that_fit:
            assert accumulation_steps(global_batch, size, world) * size * world == global_batch
    else:
        assert steps * per_device * world == global_batch
