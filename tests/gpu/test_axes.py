"""Two ranks that share a GPU, by stages or by parts of each matrix, train the model of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import sharing
from tests.ranks.launching import Run, accelerate, distance, train

pytestmark = pytest.mark.gpu

Start = Callable[..., Run]
FLAGS = ("--max_steps", "4", "--tf32", "false")


@pytest.mark.parametrize("strategy", ["pipeline", "tp"])
def test_two_ranks_train_the_model_of_one_process(run_under: Start, job: Path, tmp_path: Path, strategy: str) -> None:
    """The GPU sums in another order, so the bounds are ten times those of the CPU."""
    one = run_under("single", 1, *FLAGS)
    flags = ("--config", str(job), *FLAGS, "--ddp_backend", "gloo")
    two = train(accelerate(strategy, 2), tmp_path, *flags, script=sharing.__file__)
    assert (two.metrics["strategy"], two.metrics["world_size"]) == (strategy, 2)
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-3)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-3)
    assert distance(one.weights, two.weights) <= 1e-2 * distance(one.weights, one.weights_at(1))
