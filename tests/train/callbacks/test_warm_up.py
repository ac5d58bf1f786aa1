"""A warm-up that the run does not come to the end of."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.train.callbacks.warm_up import WarnOfWarmUp


def warnings_of(caplog: pytest.LogCaptureFixture, folder: Path, max_steps: int, **values: Any) -> str:
    args = IndicTrainingArguments(output_dir=str(folder), use_cpu=True, learning_rate=2e-5, **values)
    with caplog.at_level(logging.WARNING):
        WarnOfWarmUp().on_train_begin(args, TrainerState(max_steps=max_steps), TrainerControl())
    return caplog.text


@pytest.mark.parametrize(("warmup_steps", "steps", "max_steps"), [(500, 500, 40), (40, 40, 40), (0.1, 1, 1)])
def test_a_run_that_ends_within_its_warm_up_is_told(
    warmup_steps: float, steps: int, max_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = warnings_of(caplog, tmp_path, max_steps, warmup_steps=warmup_steps)
    assert f"--warmup_steps {warmup_steps:g} warms up for {steps} step(s), and the run has {max_steps}:" in told
    assert "--learning_rate 2e-05" in told


@pytest.mark.parametrize(
    ("values", "max_steps"),
    [
        ({"warmup_steps": 39}, 40),
        ({"warmup_steps": 0.1}, 40),
        ({"warmup_steps": 0}, 1),
        ({"warmup_steps": 500, "lr_scheduler_type": "constant"}, 40),  # it has no warm-up
    ],
)
def test_others_are_not(
    values: dict[str, Any], max_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(caplog, tmp_path, max_steps, **values) == ""
