"""Settings that round are judged by the loss of runs that learn, over five seeds of order and dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.compare_curves import LEARNED
from tests.ranks.launching import Run

LEARNS = ("--dropout", "0.1", "--learning_rate", "1e-3", "--max_steps", "36", "--save_strategy", "no")
EXACT = ("ddp", 2, "--bf16", "false")  # two ranks, whose dropout is that of the others


def last_losses(run_under: Callable[..., Run], *launch: object) -> torch.Tensor:
    """The mean loss of the last steps of a launch, of each seed. It has fallen, so that it tells something."""
    runs = [run_under(*launch, *LEARNS, "--seed", str(seed)) for seed in range(5)]
    losses = torch.tensor([run.series("loss") for run in runs])
    last = losses[:, -4:].mean(1)
    assert last.mean() < LEARNED * losses[:, :4].mean(), "They have learned too little for their losses to differ."
    return last
