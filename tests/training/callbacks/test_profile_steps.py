"""Which steps are profiled, and what of them counts."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.run import Run
from indictune.training.callbacks.profile_steps import ProfileSteps

READING_S, LEARNING_S, UPDATING_S, EVALUATING_S = 0.03, 0.02, 0.01, 0.2


class Driver:
    """Calls the callback the way the Trainer does. A step reads, learns and updates for some time."""

    def __init__(self, folder: Path, steps: int, first_step: int = 1) -> None:
        self.run = Run(read_recipe(["--output_dir", str(folder)], [IndicTrainingArguments]), 0)
        self.args = IndicTrainingArguments(output_dir=str(folder), use_cpu=True)
        self.state = TrainerState(global_step=first_step - 1)
        self.callback = ProfileSteps(steps, self.run)
        self.call("on_train_begin")

    def call(self, event: str) -> None:
        getattr(self.callback, event)(self.args, self.state, TrainerControl())

    def train(self, steps: int, evaluate_after: int = 0, stop_after: int = 0) -> None:
        for number in range(1, steps + 1):
            time.sleep(READING_S)
            self.call("on_step_begin")
            time.sleep(LEARNING_S)
            torch.ones(400, 400) @ torch.ones(400, 400)
            self.call("on_pre_optimizer_step")
            time.sleep(UPDATING_S)
            self.state.global_step += 1
            self.run.stop_request.agreed = number == stop_after
            self.call("on_step_end")
            if number == evaluate_after:
                time.sleep(EVALUATING_S)
                self.call("on_evaluate")
                time.sleep(EVALUATING_S)
                self.call("on_save")

    @property
    def written(self) -> dict[str, Any]:
        path = self.run.output_dir / "profile" / "profile.json"
        return dict(json.loads(path.read_text(encoding="utf-8")))


def test_the_steps_after_the_warm_up_are_profiled_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver(tmp_path, steps=3, first_step=11)  # a resumed run
    driver.train(8, evaluate_after=5)
    assert (driver.written["first_step"], driver.written["last_step"], driver.written["slowest"]) == (14, 16, None)
    (rank,) = driver.written["ranks"]
    assert rank["steps"] == 3
    whole = rank["compute_s"] + rank["exposed_s"] + sum(rank["gaps_s"].values())
    assert whole == pytest.approx(rank["step_s"], rel=1e-6)
    assert READING_S + LEARNING_S + UPDATING_S < rank["step_s"] < EVALUATING_S / 2
    assert rank["compute_s"] > 0 == rank["communication_s"]
    for (_, gap), least in zip(rank["gaps_s"].items(), (READING_S, LEARNING_S, UPDATING_S), strict=True):
        assert least < gap < least + 0.02
    assert "profile of steps 14 to 16" in capsys.readouterr().out
    with gzip.open(tmp_path / "profile" / "rank-0.json.gz") as trace:
        assert b"aten::mm" in trace.read()


@pytest.mark.parametrize("ends_by", ["end", "stop"])
def test_a_run_that_ends_earlier_reports_what_it_profiled(ends_by: str, tmp_path: Path) -> None:
    driver = Driver(tmp_path, steps=50)
    driver.train(5, stop_after=5 if ends_by == "stop" else 0)
    if ends_by == "end":
        driver.call("on_train_end")
    assert (driver.written["first_step"], driver.written["last_step"]) == (4, 5)


def test_a_run_that_ends_in_the_warm_up_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(tmp_path, steps=5)
    (tmp_path / "profile").mkdir()
    driver.train(3)
    driver.call("on_train_end")
    assert list((tmp_path / "profile").iterdir()) == []
    assert "nothing is profiled" in caplog.text


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(tmp_path, steps=1)
    (tmp_path / "profile").write_text("in the way")
    driver.train(4)
    assert "The run continues" in caplog.text
