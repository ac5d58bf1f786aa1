"""Evaluation counts every row once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.launching import Run, accelerate, python, start

Start = Callable[..., Run]


def numbers(metrics: Any) -> dict[str, float]:
    """Every number of nested metrics, by its path."""
    if not isinstance(metrics, dict):
        return {"": metrics}
    return {f"{key}/{path}": value for key, inner in metrics.items() for path, value in numbers(inner).items()}


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
        pytest.param("zero2_offload", 2, marks=pytest.mark.slow),
        pytest.param("zero3", 3, marks=pytest.mark.slow),
    ],
)
def test_the_evaluate_command_gives_the_numbers_of_the_run(
    run_under: Start, job: Path, tmp_path: Path, strategy: str, ranks: int
) -> None:
    """53 rows, in batches of 8 a rank: no number of ranks divides them."""
    trained = run_under("single", 1, "--per_device_train_batch_size", "24")
    launcher = python() if strategy == "single" else accelerate(strategy, ranks)
    files = ["--test_file", str(job.parent / "validation.jsonl"), "--output_dir", str(tmp_path)]
    flags = ["--model", str(trained.folder), "--per_device_eval_batch_size", "8", *files]
    result = start([*launcher, "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 0, result.stderr
    evaluated = Run(tmp_path).metrics
    # ZeRO-1 and ZeRO-2 split nothing that evaluation needs.
    assert evaluated["strategy"] == ("ddp" if strategy == "zero2_offload" else strategy)
    assert evaluated["world_size"] == ranks
    assert evaluated["test"]["num_examples"] == 53
    assert numbers(evaluated["test"]) == pytest.approx(numbers(trained.metrics["eval"]), abs=1e-6)
