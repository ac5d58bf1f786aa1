"""Calibration, worked out by hand, and a temperature that is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import log_softmax

from indictune.evaluation.uncertainty import calibration_of, expected_calibration_error, fit_temperature, reliability


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
