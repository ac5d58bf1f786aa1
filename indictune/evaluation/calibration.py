"""Whether a classifier is as often right as it is sure, and the temperature that mends it (Guo et al. 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BINS = 15
_TEMPERATURES = (0.05, 20.0)


@dataclass(frozen=True)
class Bin:
    """The rows whose confidence is in one of 15 equal parts of 0 to 1. Without rows, both means are 0."""

    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """How far confidence and accuracy are apart.

    Attributes:
        ece: expected calibration error.
        bins: of the reliability diagram, the least confident first.
        temperature: by which logits are divided, fitted on the validation rows; None if there were none.
        calibrated_ece: the error after that.
    """

    ece: float
    bins: list[Bin]
    temperature: float | None = None
    calibrated_ece: float | None = None


def reliability(confidences: np.ndarray, is_right: np.ndarray) -> list[Bin]:
    """The 15 bins of a reliability diagram.

    Args:
        confidences: probability of the predicted label, [rows]. A bin includes its upper bound.
        is_right: bool [rows].
    """
    confidences = np.asarray(confidences, np.float64)
    number = np.clip(np.ceil(confidences * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(number, minlength=BINS)
    divisors = np.maximum(counts, 1)
    sure = np.bincount(number, confidences, BINS) / divisors
    right = np.bincount(number, is_right, BINS) / divisors
    return [Bin(int(count), float(mean), float(share)) for count, mean, share in zip(counts, sure, right, strict=True)]


def expected_calibration_error(bins: list[Bin]) -> float:
    """The mean distance of confidence and accuracy over bins, weighted by their rows; 0 without rows."""
    rows = sum(each.count for each in bins)
    return math.fsum(each.count * abs(each.confidence - each.accuracy) for each in bins) / max(rows, 1)


def fit_temperature(logits: np.ndarray, references: np.ndarray) -> float:
    """The temperature from 0.05 to 20 with the lowest mean negative log-likelihood, to 4 digits.

    Args:
        logits: float [rows, labels]; a number may be added to all of a row.
        references: class ids, int [rows].
    """
    from scipy.optimize import minimize_scalar  # slow to import

    chosen = np.arange(len(references)), np.asarray(references)

    def loss(log_temperature: float) -> float:
        return -float(_cooled(logits, math.exp(log_temperature))[chosen].mean(dtype=np.float64))

    bounds = tuple(map(math.log, _TEMPERATURES))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return round(math.exp(float(found.x)), 4)


def calibration_of(
    log_probabilities: np.ndarray, is_right: np.ndarray, temperature: float | None = None
) -> Calibration:
    """The calibration of rows, before and after a temperature.

    Args:
        log_probabilities: of all labels, float [rows, labels], or of the predicted one alone, [rows].
        is_right: whether the label is predicted right, bool [rows].
        temperature: fitted on the validation rows, if there is one. It needs all labels.
    """
    best = log_probabilities if log_probabilities.ndim == 1 else log_probabilities.max(1)
    bins, after = reliability(np.exp(best), is_right), None
    if log_probabilities.ndim == 1:
        temperature = None
    if temperature is not None:
        cooled = np.exp(_cooled(log_probabilities, temperature).max(1))
        after = expected_calibration_error(reliability(cooled, is_right))
    return Calibration(expected_calibration_error(bins), bins, temperature, after)


def _cooled(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Log probabilities [rows, labels] of logits that are divided by a temperature."""
    below = logits / np.float32(temperature)
    below = below - below.max(1, keepdims=True)
    logs: np.ndarray = below - np.log(np.exp(below).sum(1, keepdims=True))
    return logs
