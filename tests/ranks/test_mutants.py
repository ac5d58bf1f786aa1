"""The comparison of test_parity.py fails a trainer with one thing broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import mutants
from tests.ranks.launching import Run, accelerate, torchrun, train
from tests.ranks.test_parity import PLAIN, differences

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


@pytest.mark.slow
@pytest.mark.parametrize("mutant", sorted(mutants.MUTANTS))
def test_the_comparison_sees_a_broken_trainer(run_under: Start, job: Path, tmp_path: Path, mutant: str) -> None:
    one = run_under("single", 1, *PLAIN)
    run = train(torchrun(2), tmp_path, "--config", str(job), script=mutants.__file__, MUTANT=mutant)
    found = differences(one, run)
    if mutant == "scaled_gradients":  # the loss of the first two steps is that of the initial weights
        assert run.series("loss")[:2] == pytest.approx(one.series("loss")[:2], rel=1e-6)
    assert found != []
    assert "initial weights" not in found


@pytest.mark.slow
def test_it_sees_a_tensor_group_with_different_rows(run_under: Start, job: Path, tmp_path: Path) -> None:
    flags = ("--padding_free", "off")  # ranks then exchange states of one shape
    name = mutants.other_rows_in_a_group.__name__
    run = train(accelerate("tp", 2), tmp_path, "--config", str(job), *flags, script=mutants.__file__, MUTANT=name)
    found = differences(run_under("single", 1, *PLAIN), run)
    assert any(each.startswith("loss of step 1:") for each in found)
    assert "initial weights" not in found
