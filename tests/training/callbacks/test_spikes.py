"""A loss or a gradient norm that stands out is told."""

from __future__ import annotations

import logging

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from indictune.training.callbacks.spikes import WarnOfSpikes


def told(caplog: pytest.LogCaptureFixture, *values: float, name: str = "loss") -> list[str]:
    callback, args, state = WarnOfSpikes(), TrainingArguments(output_dir="unused", use_cpu=True), TrainerState()
    with caplog.at_level(logging.WARNING):
        for value in values:
            state.global_step += 10
            callback.on_log(args, state, TrainerControl(), logs={name: value, "learning_rate": 1.0})
    return caplog.messages


USUAL = [1.0 + 0.01 * (step % 5) for step in range(40)]


def test_values_as_usual_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 1.05, *USUAL) == []


def test_a_value_far_above_the_others_is_told_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 1.5, *USUAL) == ["the loss of step 410 is 1.5; before, it was 1.02"]


def test_a_gradient_norm_is_watched_too(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 9.0, name="grad_norm") == ["the gradient norm of step 410 is 9; before, it was 1.02"]


def test_a_value_far_below_the_others_is_no_spike(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 0.1) == []


def test_equal_values_leave_room_for_a_little_more(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *[1.0] * 30, 1.09) == []
    assert told(caplog, *[1.0] * 30, 1.2) == ["the loss of step 310 is 1.2; before, it was 1"]


def test_the_first_values_are_only_seen(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 1.0, 50.0, 2.0) == []


def test_a_run_that_goes_on_compares_with_what_was_logged_before(caplog: pytest.LogCaptureFixture) -> None:
    callback, args, control = WarnOfSpikes(), TrainingArguments(output_dir="unused", use_cpu=True), TrainerControl()
    history = [{"loss": value, "step": step} for step, value in enumerate(USUAL)]
    state = TrainerState(log_history=[*history, {"eval_loss": 9.0, "step": 40}], global_step=41)
    callback.on_train_begin(args, state, control)
    with caplog.at_level(logging.WARNING):
        callback.on_log(args, state, control, logs={"loss": 1.5})
    assert caplog.messages == ["the loss of step 41 is 1.5; before, it was 1.02"]
