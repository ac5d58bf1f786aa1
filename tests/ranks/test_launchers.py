"""Every launcher gives the run that plain python gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import launching
from tests.ranks.launching import SCRIPT, Run, deepspeed, python, start, torchrun
from tests.ranks.test_parity import PLAIN, differences

Start = Callable[..., Run]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        (torchrun, "ddp"),
        (torchrun, "zero3"),
        (deepspeed, "zero2"),
    ],
)
def test_every_launcher_gives_the_run(
    run_under: Start, job: Path, tmp_path: Path, launcher: Callable[[int], list[str]], strategy: str
) -> None:
    flags = [] if strategy == "ddp" else ["--deepspeed", f"ds_configs/{strategy}.json"]
    command = [*launcher(2), SCRIPT, "--config", str(job), *flags, "--output_dir", str(tmp_path)]
    result = start(command, anew=True)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    run = Run(tmp_path)
    assert 1 < run.metrics["train"]["time_to_first_step_s"] < 300  # imports alone take more than a second
    assert (run.metrics["strategy"], run.metrics["world_size"]) == (strategy, 2)
    assert differences(run_under("single", 1, *PLAIN), run) == []


def test_python_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test-gpu GPU_PYTHON=python3`: where that is, there may be no `python`."""
    monkeypatch.setattr("sys.executable", "/somewhere/python3")
    assert python() == ["/somewhere/python3"]


def test_where_there_is_a_gpu_python_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process whose imports have opened it could not use it."""
    forked: list[list[str]] = []
    monkeypatch.setattr(launching, "fork", lambda command, *_: forked.append(command))
    command = [*python(), "indictune/__main__.py", "--help"]
    start(command)
    assert forked == [command[1:]]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert start(command).returncode == 0
    assert len(forked) == 1
