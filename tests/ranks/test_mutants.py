"""The comparison of test_parity.py fails a trainer with one thing broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import mutants
from tests.ranks.launching import Run, accelerate, start, torchrun, train
from tests.ranks.test_parity import PLAIN, RELATIVE, differences

Start = Callable[..., Run]


@pytest.mark.slow
def test_what_fills_zero3s_parts_up_is_no_weight(job: Path, tmp_path: Path) -> None:
    """DeepSpeed (0.19) leaves it as it was in the memory: NaN there ended runs whose weights were whole."""
    run = train(
        accelerate("zero3", 2),
        tmp_path,
        *("--config", str(job), "--max_steps", "2"),
        script=mutants.__file__,
        MUTANT=mutants.memory_of_nan.__name__,
    )
    assert all(bool(weight.isfinite().all()) for weight in run.weights.values())


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(name, marks=pytest.mark.more if name == "lost_row" else pytest.mark.slow)
        for name in sorted(mutants.MUTANTS)
    ],
)
def test_the_comparison_sees_a_broken_trainer(run_under: Start, job: Path, tmp_path: Path, mutant: str) -> None:
    one = run_under("single", 1, *PLAIN)
    run = train(torchrun(2), tmp_path, "--config", str(job), script=mutants.__file__, MUTANT=mutant)
    found = differences(one, run)
    if mutant == "scaled_gradients":  # the loss of the first two steps is that of the initial weights
        assert run.series("loss")[:2] == pytest.approx(one.series("loss")[:2], rel=1e-6)
    assert found != []
    assert "initial weights" not in found


@pytest.mark.more
def test_it_sees_a_tensor_group_with_different_rows(run_under: Start, job: Path, tmp_path: Path) -> None:
    """The ranks' whole weights move apart too, so the check of the saved model fails the run."""
    flags = ["--config", str(job), "--padding_free", "off", "--output_dir", str(tmp_path)]
    name = mutants.other_rows_in_a_group.__name__
    result = start([*accelerate("tp", 2), mutants.__file__, *flags], {"MUTANT": name})
    assert result.returncode == 1
    one, run = run_under("single", 1, *PLAIN), Run(tmp_path)
    assert len(run.log) == len(one.log)
    assert run.series("loss") != pytest.approx(one.series("loss"), rel=RELATIVE)
    assert run.series("grad_norm") != pytest.approx(one.series("grad_norm"), rel=RELATIVE)
