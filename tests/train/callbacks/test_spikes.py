"""A loss or a gradient norm that stands out is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from indictune.train.callbacks.spikes import WarnOfSpikes


def told(caplog: pytest.LogCaptureFixture, *values: float) -> list[str]:
    callback, args, state = WarnOfSpikes(float), TrainingArguments(output_dir="unused", use_cpu=True), TrainerState()
    with caplog.at_level(logging.WARNING):
        for value in values:
            state.global_step += 10
            callback.on_log(args, state, TrainerControl(), logs={"loss": value, "learning_rate": 1.0})
    return caplog.messages


def told_of_norms(caplog: pytest.LogCaptureFixture, *norms: float, logging_steps: int) -> list[str]:
    """Of a run with these norms, a step each."""
    state, args, control = TrainerState(), TrainingArguments(output_dir="unused", use_cpu=True), TrainerControl()
    callback = WarnOfSpikes(lambda: torch.tensor(norms[state.global_step - 1]))
    with caplog.at_level(logging.WARNING):
        while state.global_step < len(norms):
            state.global_step += 1
            callback.on_step_end(args, state, control)
            if state.global_step % logging_steps == 0:
                callback.on_log(args, state, control, logs={"loss": 1.0, "grad_norm": norms[state.global_step - 1]})
        callback.on_train_end(args, state, control)
    return caplog.messages


USUAL = [1.0 + 0.01 * (step % 5) for step in range(40)]


def test_values_as_usual_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 1.05, *USUAL) == []


def test_a_value_far_above_the_others_is_told_with_its_step(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 1.5, *USUAL) == ["the loss of step 410 is 1.5; before, it was 1.02"]


@pytest.mark.parametrize("logging_steps", [1, 10, 1000])
def test_a_gradient_norm_between_two_logged_steps_is_told(
    caplog: pytest.LogCaptureFixture, logging_steps: int
) -> None:
    found = told_of_norms(caplog, *USUAL, 9.0, *USUAL, *USUAL, logging_steps=logging_steps)
    assert found == ["the gradient norm of step 41 is 9; before, it was 1.02"]


def test_of_several_norms_the_largest_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert told_of_norms(caplog, *USUAL, 7.0, 9.0, 8.0, *USUAL, logging_steps=20) == [
        "the gradient norm of step 42 is 9; before, it was 1.02; it is the largest of 3 that stand out"
    ]


def test_a_norm_that_is_none_is_told_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    bad = (float("nan"), float("inf"))
    assert told_of_norms(caplog, *USUAL, *bad, *USUAL, logging_steps=10) == []


@pytest.mark.parametrize(("read_by", "norms"), [("log", 99), ("step 100", 100)])
def test_norms_wait_for_the_log_and_are_read_at_once(read_by: str, norms: int) -> None:
    """Until the next log, or for a hundred steps, nobody reads them, and then all together: the device goes on."""
    reads = []

    class Watched(torch.Tensor):
        def __float__(self) -> float:
            raise AssertionError("read alone")

        def tolist(self) -> list[float]:
            reads.append(len(self))
            return [1.0] * len(self)

    state, args, control = TrainerState(), TrainingArguments(output_dir="unused", use_cpu=True), TrainerControl()
    callback = WarnOfSpikes(lambda: torch.ones(()).as_subclass(Watched))
    for _ in range(99):
        state.global_step += 1
        callback.on_step_end(args, state, control)
    assert reads == []
    state.global_step += 1
    by_log = partial(callback.on_log, logs={"loss": 1.0})
    read: Callable[..., None] = by_log if read_by == "log" else callback.on_step_end
    read(args, state, control)
    assert reads == [norms]


def test_a_value_far_below_the_others_is_no_spike(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *USUAL, 0.1) == []


def test_equal_values_leave_room_for_a_little_more(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, *[1.0] * 30, 1.09) == []
    assert told(caplog, *[1.0] * 30, 1.2) == ["the loss of step 310 is 1.2; before, it was 1"]


def test_the_first_values_are_only_seen(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, 1.0, 50.0, 2.0) == []


def test_a_run_that_goes_on_compares_with_what_was_logged_before(caplog: pytest.LogCaptureFixture) -> None:
    callback, args, control = (
        WarnOfSpikes(float),
        TrainingArguments(output_dir="unused", use_cpu=True),
        TrainerControl(),
    )
    history = [{"loss": value, "step": step} for step, value in enumerate(USUAL)]
    state = TrainerState(log_history=[*history, {"eval_loss": 9.0, "step": 40}], global_step=41)
    callback.on_train_begin(args, state, control)
    with caplog.at_level(logging.WARNING):
        callback.on_log(args, state, control, logs={"loss": 1.5})
    assert caplog.messages == ["the loss of step 41 is 1.5; before, it was 1.02"]


def test_a_run_that_goes_on_forgets_what_was_no_number(caplog: pytest.LogCaptureFixture) -> None:
    """A median over NaN is any of the values, or NaN (Python's `statistics`)."""
    callback, state = WarnOfSpikes(float), TrainerState(global_step=41)
    state.log_history = [{"loss": value} for value in (*[float("nan")] * 30, *USUAL)]
    args, control = TrainingArguments(output_dir="unused", use_cpu=True), TrainerControl()
    callback.on_train_begin(args, state, control)
    with caplog.at_level(logging.WARNING):
        callback.on_log(args, state, control, logs={"loss": 1.5})
    assert caplog.messages == ["the loss of step 41 is 1.5; before, it was 1.02"]
