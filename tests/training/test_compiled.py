"""A compiled model trains as the plain one does, whatever the lengths of its batches, under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FinishedRun
from tests.distributed.launching import Run, accelerate, python, train

pytestmark = pytest.mark.slow  # it compiles for minutes
FLAGS = ("--dropout", "0", "--logging_steps", "1")


@pytest.fixture(scope="module")
def plain(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(python(), tmp_path_factory.mktemp("plain"), "--config", str(finished_run.recipe), *FLAGS)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_its_losses_are_those_of_the_plain_one(
    plain: Run, finished_run: FinishedRun, tmp_path: Path, strategy: str
) -> None:
    launcher = python() if strategy == "single" else accelerate(strategy, 2)
    flags = ("--config", str(finished_run.recipe), *FLAGS, "--torch_compile", "true")
    compiled = train(launcher, tmp_path / "compiled", *flags)
    assert len(plain.log) == 8
    assert compiled.series("loss") == pytest.approx(plain.series("loss"), abs=1e-4)
    assert compiled.series("loss") != plain.series("loss")  # other kernels round otherwise
    assert compiled.weights.keys() == plain.weights.keys()
