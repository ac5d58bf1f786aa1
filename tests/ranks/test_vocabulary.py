"""A run that trains only the embedding rows of its texts gives the model of the run that trains all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ranks.launching import EMBEDDING, SCRIPT, Run, python, start
from tests.ranks.test_parity import OF_THE_CHANGE, ONE_MICRO_BATCH, differences

Start = Callable[..., Run]

ON = ("--active_vocabulary", "on")
OFF = ("--active_vocabulary", "off")
ROWS = 5000  # of the built-in model


@pytest.mark.more
@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero3"))]
)
def test_the_model_is_that_of_dense_training(run_under: Start, strategy: str) -> None:
    """With clipping, and two accumulation steps on each of two ranks."""
    dense, active = run_under("single", 1, *ONE_MICRO_BATCH, *OFF), run_under(strategy, 2, *ON)
    assert differences(dense, active) == []
    assert max(active.series("grad_norm")) > 1  # --max_grad_norm
    start = dense.weights_at(1)[EMBEDDING]
    change = dense.weights[EMBEDDING] - start
    assert (active.weights[EMBEDDING] - dense.weights[EMBEDDING]).norm() <= OF_THE_CHANGE * change.norm()

    used = active.row_ids_at(12)
    assert 500 < len(used) < ROWS / 2
    unused = torch.ones(ROWS, dtype=torch.bool)
    unused[used] = False
    assert torch.equal(active.weights[EMBEDDING][unused], start[unused])
    assert change[~unused].any(1).sum() > 500
    log = (active.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    assert f"active vocabulary: {len(used):,} of 5,000 embedding rows are trained" in log


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero2", "zero3"])
def test_the_best_checkpoint_is_loaded(run_under: Start, strategy: str) -> None:
    """Each step makes the loss worse, so that the best is not the last checkpoint."""
    flags = (
        *("--max_steps", "3", "--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end", "true"),
        *("--metric_for_best_model", "loss", "--learning_rate", "0.3"),
    )
    run = run_under(strategy, 1 if strategy == "single" else 2, *flags, *ON)
    log = (run.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    best = int(log.partition("The model is that of checkpoint-")[2].partition(",")[0])
    assert best < 3
    for name, weights in run.weights_at(best).items():
        assert torch.equal(run.weights[name], weights)
    assert not torch.equal(run.weights[EMBEDDING], run.weights_at(3)[EMBEDDING])


@pytest.mark.slow
def test_a_checkpoint_of_some_rows_is_refused_where_all_are_trained(
    run_under: Start, job: Path, tmp_path: Path
) -> None:
    run = run_under("fsdp2", 2, *ON)
    checkpoint = ["--resume_from_checkpoint", str(run.folder / "checkpoint-7"), "--trust_checkpoint", "true"]
    flags = [*checkpoint, "--output_dir", str(tmp_path / "out")]
    result = start([*python(), SCRIPT, "--config", str(job), *ONE_MICRO_BATCH, *OFF, *flags])
    assert result.returncode == 2, result.stderr
    assert f"--resume_from_checkpoint {run.folder / 'checkpoint-7'}: " in result.stderr
    assert "[checkpoint-trains-some-rows]" in result.stderr
