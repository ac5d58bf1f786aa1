"""A logged loss or gradient norm that stands out is warned of."""

from __future__ import annotations

import logging

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from indictune.train.callbacks.spikes import WarnOfSpikes

USUAL = [1.0 + 0.01 * (step % 5) for step in range(40)]


def warnings_of(
    caplog: pytest.LogCaptureFixture, *values: float, key: str = "loss", state: TrainerState | None = None
) -> list[str]:
    """The warnings of a run that logs these values, one every ten steps."""
    callback, args = WarnOfSpikes(), TrainingArguments(output_dir="unused", use_cpu=True)
    state = TrainerState() if state is None else state
    callback.on_train_begin(args, state, TrainerControl())
    with caplog.at_level(logging.WARNING):
        for value in values:
            state.global_step += 10
            callback.on_log(args, state, TrainerControl(), logs={key: value, "learning_rate": 1.0})
    return caplog.messages


def test_usual_values_are_no_spikes(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *USUAL, 1.05, *USUAL) == []


@pytest.mark.parametrize(("key", "name"), [("loss", "loss"), ("grad_norm", "gradient norm")])
def test_a_value_far_above_the_others_is_reported_with_its_step(
    caplog: pytest.LogCaptureFixture, key: str, name: str
) -> None:
    found = warnings_of(caplog, *USUAL, 1.5, *USUAL, key=key)
    assert found == [f"the {name} of step 410 is 1.5; before, it was 1.02"]


def test_a_norm_that_is_not_finite_is_reported_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *USUAL, float("nan"), float("inf"), *USUAL, key="grad_norm") == []


def test_a_value_far_below_the_others_is_no_spike(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *USUAL, 0.1) == []


def test_equal_values_leave_room_for_a_little_more(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *[1.0] * 30, 1.09) == []
    assert warnings_of(caplog, *[1.0] * 30, 1.2) == ["the loss of step 310 is 1.2; before, it was 1"]


def test_the_first_values_are_no_spikes(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, 1.0, 50.0, 2.0) == []


def test_a_resumed_run_compares_with_the_log_before(caplog: pytest.LogCaptureFixture) -> None:
    """NaN in that log does not count: a median over NaN is any of the values, or NaN (Python's `statistics`)."""
    history = [{"loss": value, "step": step} for step, value in enumerate((*[float("nan")] * 30, *USUAL))]
    state = TrainerState(log_history=[*history, {"eval_loss": 9.0, "step": 40}], global_step=41)
    assert warnings_of(caplog, 1.5, state=state) == ["the loss of step 51 is 1.5; before, it was 1.02"]
