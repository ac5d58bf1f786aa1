"""What two ranks really send in a step is what the formula says, for gradients and weights in either type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.communication import BYTES, STRATEGIES, count_bytes, expected_bytes, in_types
from tests.ranks.launching import Run
from tests.ranks.spread import EXACT, last_losses

# Bytes of a micro-batch's heads of messages, of the counts of rows, and of the norm of the gradient. ZeRO-3 has a
# message for each parameter.
PROTOCOL = {"ddp": 4_000, "fsdp2": 10_000, "zero1": 4_000, "zero2": 4_000, "zero3": 45_000}

IN_FP32 = [(strategy, dtype, "float32", steps) for strategy in STRATEGIES for dtype in BYTES for steps in (1, 2)]
IN_BF16 = [(strategy, dtype, "bfloat16", 1) for strategy in STRATEGIES for dtype in BYTES]
IN_BF16 += [("fsdp2", "float32", "bfloat16", 2)]
IN_MORE = [("fsdp2", "float32", "float32", 1)]


@pytest.mark.parametrize(
    ("strategy", "reduce_dtype", "weight_dtype", "accumulation_steps"),
    [
        pytest.param(*each, marks=pytest.mark.more if each in IN_MORE else pytest.mark.slow)
        for each in (*IN_FP32, *IN_BF16)
    ],
)
def test_a_rank_sends_what_the_formula_says(
    tmp_path: Path, strategy: str, reduce_dtype: str, weight_dtype: str, accumulation_steps: int
) -> None:
    rows = ("--per_device_train_batch_size", str(8 // accumulation_steps))
    counts = count_bytes(strategy, tmp_path, *in_types(reduce_dtype, weight_dtype), *rows)
    assert len(counts) == 2
    for count in counts:
        assert len(count.bytes_of_steps) == 7
        expected = expected_bytes(strategy, count, reduce_dtype, weight_dtype, accumulation_steps)
        assert expected < count.sent < expected + accumulation_steps * PROTOCOL[strategy]
    assert counts[0].elements == counts[1].elements > 100_000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_bfloat16_sums_stay_within_the_spread_of_seeds(run_under: Callable[..., Run], strategy: str) -> None:
    """The mean loss of the last steps, over five seeds of order and dropout, differs less than seeds do."""
    exact = last_losses(run_under, *EXACT)
    rounded = last_losses(run_under, strategy, 2, "--bf16", "false", "--reduce_dtype", "bfloat16")
    assert not torch.equal(exact, rounded)
    assert abs(exact.mean() - rounded.mean()) <= exact.std()
