"""`indictune parity` compares what ran, reports what was refused, and returns 1 where a run differs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from indictune.commands import parity
from indictune.commands.parity import Ended, exact_flags, run_parity
from indictune.commands.train import Asked, read_asked
from indictune.config.command_line import read_flags
from indictune.distributed.choose_launcher import Launcher, fitting_launcher
from indictune.errors import UserError
from tests.parity.test_compare import LOSSES, NORMS
from tests.parity.test_compare import run as finished

RECIPE = "recipes/sentiment/demo.yaml"
REFUSAL = "that many processes do not multiply [axes-do-not-multiply]"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Stands in for the runs: losses under FSDP2 are twice too large, and pipelines are refused."""
    names: list[str] = []

    def run(asked: Asked, name: str, launcher: Launcher, folder: Path) -> Ended:
        names.append(f"{name} x {launcher.processes}")
        factor = 2.0 if name == "fsdp2" else 1.0
        finished(tmp_path / name, [factor * loss for loss in LOSSES], NORMS, [{}, {}])
        state, message = ("user_error", REFUSAL) if name == "pipeline" else ("ok", "")
        return Ended(name, launcher.processes, tmp_path / name, state, message)

    monkeypatch.setattr(parity, "run_one", run)
    return names


def test_runs_that_agree(started: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_parity(read_flags([RECIPE, "--strategies", "ddp", "--num_processes", "3"])) == 0
    assert started == ["one process x 1", "ddp x 3"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "Each run next to one process, 2 steps; relative differences, tolerance 0.0001"
    assert said[-1] == "1 of 1 strategies that ran train the model of one process."
    assert said[-2].split() == ["ddp", "2", "0.0e+00", "0.0e+00", "0.0e+00", "0.0e+00", "same"]


@pytest.mark.more
def test_a_run_that_differs_and_one_that_is_refused(
    started: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "curves.png"
    flags = ["--strategies", "ddp,fsdp2,pipeline", "--json", "--plot", str(picture)]
    assert run_parity(read_flags([RECIPE, *flags])) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["ddp"]["agrees"] is True
    differs = found["runs"]["fsdp2"]
    assert differs["differences"]["loss"] == {"largest": 1.0, "first_beyond_tolerance": 1}
    assert differs["causes"][0].startswith("loss scaling: at step 1 the loss is 2 times")
    assert found["stopped"] == {"pipeline": {"state": "user_error", "message": REFUSAL}}
    assert found["losses"] == {"one process": LOSSES, "ddp": LOSSES, "fsdp2": [4.0, 2.0]}
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("strategies", "code"), [("ddp,pipeline", 0), ("pipeline", 1), ("fsdp2,pipeline", 1)])
def test_a_refusal_is_no_failure_if_something_was_compared(started: list[str], strategies: str, code: int) -> None:
    assert run_parity(read_flags([RECIPE, "--strategies", strategies, "--num_processes", "2"])) == code


def test_a_strategy_is_needed() -> None:
    with pytest.raises(UserError) as caught:
        run_parity(read_flags([RECIPE]))
    assert caught.value.code == "argument-missing"


def test_unknown_strategies_are_refused_before_anything_runs(started: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        run_parity(read_flags([RECIPE, "--strategies", "dpp,ddp,zero9"]))
    assert [(each.flag, each.value) for each in caught.value.problems] == [
        ("--strategies", "dpp"),
        ("--strategies", "zero9"),
    ]
    assert started == []


def test_a_file_is_run_once_and_another_of_its_name_too(started: list[str], tmp_path: Path) -> None:
    other = shutil.copy("accelerate_configs/ddp.yaml", tmp_path)
    assert run_parity(read_flags([RECIPE, "--strategies", f"ddp,ddp,{other}", "--num_processes", "2"])) == 0
    assert started == ["one process x 1", "ddp x 2", "ddp-2 x 2"]


def test_all_problems_come_at_once(started: list[str]) -> None:
    flags = ["--strategies", "zero9", "--output_dir", "recipes", "--plot", "README.md/x.png", "--max_steps", "1"]
    with pytest.raises(UserError) as caught:
        run_parity(read_flags([RECIPE, *flags]))
    assert [each.flag for each in caught.value.problems] == ["--max_steps", "--strategies", "--output_dir", "--plot"]


def test_flags_that_parity_sets_are_refused(started: list[str]) -> None:
    typed = ["--steps", "3", "--max_steps", "5", "--logging_steps", "2", "--num_train_epochs", "1"]
    with pytest.raises(UserError) as caught:
        run_parity(read_flags([RECIPE, "--strategies", "zero9", *typed]))
    refused = [each.flag for each in caught.value.problems if each.code == "parity-sets"]
    assert refused == ["--max_steps", "--num_train_epochs", "--logging_steps"]
    assert len(caught.value.problems) == 4
    assert started == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--plot", "curves.txt"], "picture-of-another-kind"),
        (["--plot", "README.md/curves.png"], "folder-not-writable"),
        (["--output_dir", "README.md"], "folder-not-writable"),
        (["--output_dir", "recipes"], "folder-not-empty"),
        (["--steps", "0"], "expected-at-least"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_before_anything_runs(
    started: list[str], flags: list[str], code: str
) -> None:
    with pytest.raises(UserError) as caught:
        run_parity(read_flags([RECIPE, "--strategies", "ddp", *flags]))
    assert caught.value.code == code
    assert started == []


def test_nothing_is_compared_with_a_run_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "run_one", lambda *_: Ended("one process", 1, Path("x"), "failed", "no memory"))
    with pytest.raises(UserError) as caught:
        run_parity(read_flags([RECIPE, "--strategies", "ddp"]))
    assert caught.value.code == "parity-no-reference"
    assert "no memory" in str(caught.value)


def test_runs_are_exact_unless_the_user_asks_for_something_else() -> None:
    asked = exact_flags(read_asked([RECIPE, "--dropout", "0.1", "--output_dir", "x"]), 7)
    given = {name: " ".join(words) for name, words in asked.flags.items()}
    assert (given["dropout"], given["bf16"], given["max_steps"], given["logging_steps"]) == ("0.1", "false", "7", "1")
    assert "num_sample_generations" not in given  # of conversations alone


def test_without_gpus_a_strategy_gets_as_few_processes_as_it_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indictune.distributed.choose_launcher.visible_gpus", lambda: 0)
    found = {name: fitting_launcher(name, None).processes for name in ("single_gpu", "ddp", "fsdp2_tp", "tp")}
    assert found == {"single_gpu": 1, "ddp": 2, "fsdp2_tp": 4, "tp": 2}
    assert fitting_launcher("fsdp2_tp", 6).processes == 6
