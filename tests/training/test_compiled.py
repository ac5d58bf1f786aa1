"""A compiled model trains as the plain one does, whatever the lengths of its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FinishedRun
from tests.distributed.launching import python, train


@pytest.mark.slow  # it compiles for minutes
def test_its_losses_are_those_of_the_plain_one(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ("--config", str(finished_run.recipe), "--dropout", "0", "--logging_steps", "1")
    plain = train(python(), tmp_path / "plain", *flags)
    compiled = train(python(), tmp_path / "compiled", *flags, "--torch_compile", "true")
    assert len(plain.log) == 8
    assert compiled.series("loss") == pytest.approx(plain.series("loss"), abs=1e-4)
    assert compiled.series("loss") != plain.series("loss")  # other kernels round otherwise
    assert compiled.weights.keys() == plain.weights.keys()
