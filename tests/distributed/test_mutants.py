"""The comparison of test_parity.py fails a trainer with one thing broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import mutants
from tests.distributed.launching import Run, torchrun, train
from tests.distributed.test_parity import PLAIN, differences

Start = Callable[..., Run]


FAST = ("scaled_gradients",)
MUTANTS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in sorted(mutants.MUTANTS)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_sees_a_broken_trainer(run_under: Start, job: Path, tmp_path: Path, mutant: str) -> None:
    one = run_under("single", 1, *PLAIN)
    run = train(torchrun(2), tmp_path, "--config", str(job), script=mutants.__file__, MUTANT=mutant)
    found = differences(one, run)
    if mutant == "scaled_gradients":  # the loss of the first two steps is that of the initial weights
        assert run.series("loss")[:2] == pytest.approx(one.series("loss")[:2], rel=1e-6)
    assert found != []
    assert "initial weights" not in found
