"""On one GPU, each strategy without offload trains the model of plain python, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks.launching import Run, distance, python, start

pytestmark = pytest.mark.gpu

Start = Callable[..., Run]
STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
COMPILED = """
import torch
from indictune.config.arguments import SentimentTrainingArguments
SentimentTrainingArguments("unused", bf16=True, tf32=True)
layer = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
torch.compile(layer, mode="max-autotune-no-cudagraphs")(torch.ones(256, 256, device="cuda", dtype=torch.bfloat16))
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_under_a_strategy_is_one_process(run_under: Start, strategy: str) -> None:
    """Without tf32. The GPU sums in another order, so the bounds are ten times those of the CPU."""
    one, other = run_under("single", 1, "--tf32", "false"), run_under(strategy, 1, "--tf32", "false")
    assert other.series("loss") == pytest.approx(one.series("loss"), rel=1e-3)
    assert other.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-3)
    assert distance(one.weights, other.weights) <= 1e-2 * distance(one.weights, one.weights_at(1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_is_near_fp32(run_under: Start, strategy: str) -> None:
    one, other = run_under("single", 1, "--tf32", "false"), run_under(strategy, 1, "--bf16", "true")
    assert other.series("loss") != pytest.approx(one.series("loss"), rel=1e-5)
    assert other.series("loss") == pytest.approx(one.series("loss"), rel=2e-2)


def test_a_compiler_can_autotune_kernels_with_tf32() -> None:
    done = start([*python(), "-c", COMPILED])
    assert done.returncode == 0, done.stderr
