"""Ranks are compared every so many steps, and before whatever saves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate.state import DistributedType
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import SINGLE
from indictune.distributed.agreement import DivergedError
from indictune.training.callbacks import every_step
from indictune.training.callbacks.every_step import CheckDivergence


class Driver:
    """Ends steps as the Trainer does. Notes which ones are compared, and at which a begun checkpoint is finished."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, bad: int = 0) -> None:
        self.compared: list[int] = []
        self.optimizers: list[Any] = []
        self.finished: list[int] = []
        self.bad = bad
        self.args = IndicTrainingArguments(output_dir=str(folder), use_cpu=True)
        self.state = TrainerState()
        model = torch.nn.Linear(2, 2)
        self.accelerator = SimpleNamespace(
            distributed_type=DistributedType.MULTI_CPU, unwrap_model=lambda model, **_: model
        )
        trainer = SimpleNamespace(
            launch=SINGLE,
            model=model,
            optimizer=SimpleNamespace(optimizer="states"),
            accelerator=self.accelerator,
            checkpoints=SimpleNamespace(finish=lambda: self.finished.append(self.state.global_step)),
        )
        self.callback = CheckDivergence(cast(Any, trainer), 3)
        patch.setattr(every_step, "check_copies", self.check)

    def check(self, step: int, flag: str, model: object, optimizer: object, launch: object) -> None:
        self.compared.append(step)
        self.optimizers.append(optimizer)
        if step == self.bad:
            raise DivergedError

    def step(self, **control: bool) -> None:
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, TrainerControl(**control))


def test_every_third_step_and_each_save_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, monkeypatch)
    for number in range(1, 8):
        driver.step(should_save=number == 5)
    assert driver.compared == [3, 5, 6]
    driver.callback.on_epoch_end(driver.args, driver.state, TrainerControl())
    driver.callback.on_epoch_end(driver.args, driver.state, TrainerControl(should_save=True))
    assert driver.compared == [3, 5, 6, 7]
    assert set(driver.optimizers) == {"states"}


def test_a_checkpoint_that_was_begun_is_finished_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, monkeypatch, bad=3)
    driver.step()
    driver.step()
    with pytest.raises(DivergedError):
        driver.step()
    assert driver.finished == [3]


def test_states_that_an_engine_splits_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, monkeypatch)
    driver.accelerator.distributed_type = DistributedType.DEEPSPEED
    driver.step(should_save=True)
    assert driver.optimizers == [None]
