"""Calibration, worked out by hand, and a temperature that is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from indictune.evaluation.uncertainty import (
    calibration_of,
    expected_calibration_error,
    fit_temperature,
    helpful_temperature,
    reliability,
)


def test_the_error_of_two_bins_by_hand() -> None:
    # Bin 15 has 0.95 and 0.97, one of two right: |0.96 - 0.5| = 0.46. Bin 8 has 0.5 twice, both right: 0.5.
    bins = reliability(np.array([0.95, 0.5, 0.97, 0.5]), np.array([True, True, False, True]))
    assert [number for number, each in enumerate(bins, 1) if each.count] == [8, 15]
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.46 + 2 * 0.5) / 4)


def test_a_bin_includes_its_upper_bound() -> None:
    bins = reliability(np.array([3 / 15, 1.0, 0.0]), np.array([True, True, True]))
    assert [number for number, each in enumerate(bins, 1) if each.count] == [1, 3, 15]


def test_the_temperature_of_rows_that_were_drawn_with_it() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(scale=4, size=(20_000, 3)).astype(np.float32)
    shares = np.exp(log_softmax(logits / 2.5, axis=1)).cumsum(1)
    references = (random.random((20_000, 1)) > shares).sum(1).clip(max=2)
    temperature = fit_temperature(log_softmax(logits, axis=1), references)
    assert temperature == pytest.approx(2.5, rel=0.05)
    found = calibration_of(log_softmax(logits, axis=1), logits.argmax(1) == references, temperature)
    assert found.calibrated_ece is not None
    assert found.ece > 0.1 > 0.02 > found.calibrated_ece


def drawn(rows: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Logits of three labels, float [rows, 3], and labels that are drawn with a temperature, [rows]."""
    random = np.random.default_rng(1)
    logits = random.normal(scale=4, size=(rows, 3)).astype(np.float32)
    shares = np.exp(log_softmax(logits / temperature, axis=1)).cumsum(1)
    return logits, (random.random((rows, 1)) > shares).sum(1).clip(max=2)


def test_a_temperature_is_kept_only_where_it_helps_rows_that_it_was_not_fitted_on() -> None:
    assert helpful_temperature(*drawn(2000, 2.5)) == pytest.approx(2.5, rel=0.1)
    assert helpful_temperature(*drawn(2000, 1.0)) is None  # logits that are right as they are


def test_a_temperature_at_its_limit_is_none() -> None:
    logits, _ = drawn(50, 1.0)
    assert fit_temperature(logits, logits.argmax(1)) < 0.06
    assert helpful_temperature(logits, logits.argmax(1)) is None
    assert helpful_temperature(logits[:1], logits[:1].argmax(1)) is None
