"""How sure a score is, by resampled rows; and how sure a model is, by its calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 1_000
BLOCKS = 1_000
_PERCENTILES = (2.5, 97.5)
_SEED = 0
_CELLS_AT_ONCE = 4_000_000  # 32 MB of counts


@dataclass(frozen=True)
class Estimate:
    """A score with its 95% interval, NaN to NaN where none was asked for."""

    value: float
    low: float
    high: float


def estimate(value: float, drawn: np.ndarray) -> Estimate:
    """A score with the interval of its values in drawn rows, [draws]."""
    return estimates(np.array([value]), drawn[:, None])[0]


def estimates(values: np.ndarray, drawn: np.ndarray) -> list[Estimate]:
    """Scores [scores], with the intervals of their values in drawn rows, [draws, scores]."""
    bounds = np.percentile(drawn, _PERCENTILES, axis=0) if len(drawn) else np.full((2, len(values)), np.nan)
    return [Estimate(*each) for each in np.stack([values, *bounds], 1).tolist()]


def ratio_of_sums(above: np.ndarray, below: np.ndarray, draws: int = RESAMPLES) -> Estimate:
    """The sum of one column [rows] by that of another; 0 where the latter is 0."""
    drawn = resampled_sums([above, below], draws)
    return estimate(float(ratio(above.sum(), below.sum())), ratio(drawn[:, 0], drawn[:, 1]))


def resampled_counts(counts: np.ndarray, draws: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Counts of rows in cells, as resampled rows have them: they are multinomial. A million rows cost as a hundred.

    `counts` has one row at least, int64 [cells]. Yields int64 [some of the draws, cells], the same each time; without
    draws a single array, [0, cells].
    """
    random, rows = np.random.default_rng(_SEED), int(counts.sum())
    at_once = max(1, _CELLS_AT_ONCE // len(counts))
    for start in range(0, max(draws, 1), at_once):
        yield random.multinomial(rows, counts / rows, size=min(at_once, draws - start))


def resampled_sums(columns: Sequence[np.ndarray], draws: int = RESAMPLES) -> np.ndarray:
    """Sums over resampled rows, of scores that follow from sums: float64 [draws, columns], the same each time.

    More than 1,000 rows are first summed in 1,000 random blocks of equal size (but for one row), which are then drawn.
    """
    if not draws:
        return np.zeros((0, len(columns)))
    rows = len(columns[0])
    blocks = min(rows, BLOCKS)
    block_of_row = np.random.default_rng(_SEED).permutation(rows) % blocks
    sums = np.stack([np.bincount(block_of_row, each, blocks) for each in columns], 1)
    summed: np.ndarray = _times_drawn(blocks, draws) @ sums
    return summed


@lru_cache(maxsize=8)
def _times_drawn(blocks: int, draws: int) -> np.ndarray:
    """How often each block is drawn, float64 [draws, blocks]."""
    random = np.random.default_rng(_SEED)
    drawn: np.ndarray = random.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)
    return drawn.astype(np.float64)


def ratio(above: np.ndarray | float, below: np.ndarray | float) -> np.ndarray:
    """`above / below`, and 0 where `below` is 0."""
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    quotients: np.ndarray = np.zeros(np.broadcast_shapes(above.shape, below.shape))
    np.divide(above, below, out=quotients, where=below != 0)
    return quotients


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
        ece: expected calibration error, and `calibrated_ece` that after the temperature.
        bins: of the reliability diagram, the least confident first.
        temperature: by which logits are divided, fitted on the validation rows; None if there were none, or it would
            not help.
    """

    ece: float
    bins: list[Bin]
    temperature: float | None = None
    calibrated_ece: float | None = None


def reliability(confidences: np.ndarray, is_right: np.ndarray) -> list[Bin]:
    """The 15 bins of a reliability diagram; a bin includes its upper bound.

    `confidences` are the probabilities of the predicted labels, [rows], `is_right` bool [rows].
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

    `logits` are float [rows, labels], `references` class ids, int [rows].
    """
    from scipy.optimize import minimize_scalar  # slow to import

    chosen = np.arange(len(references)), np.asarray(references)

    def loss(log_temperature: float) -> float:
        return -float(_cooled(logits, math.exp(log_temperature))[chosen].mean(dtype=np.float64))

    bounds = tuple(map(math.log, _TEMPERATURES))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return round(math.exp(float(found.x)), 4)


def helpful_temperature(logits: np.ndarray, references: np.ndarray) -> float | None:
    """`fit_temperature` if such a temperature helps, else None; arguments as there.

    It helps if, over the halves of the rows, that of each half lowers the mean calibration error of the other. One at
    an end of its range is none: the rows are too few, or all predictions right.
    """
    first = np.arange(len(references)) % 2 == 0
    errors = {"before": 0.0, "after": 0.0}
    for fitted in (first, ~first) if len(references) > 1 else ():
        logs, is_right = logits[~fitted], logits[~fitted].argmax(1) == references[~fitted]
        found = calibration_of(_cooled(logs, 1.0), is_right, fit_temperature(logits[fitted], references[fitted]))
        assert found.calibrated_ece is not None
        errors["before"] += found.ece
        errors["after"] += found.calibrated_ece
    temperature = fit_temperature(logits, references)
    is_inside = _TEMPERATURES[0] * 1.01 < temperature < _TEMPERATURES[1] / 1.01
    return temperature if is_inside and errors["after"] < errors["before"] else None


def calibration_of(
    log_probabilities: np.ndarray, is_right: np.ndarray, temperature: float | None = None
) -> Calibration:
    """The calibration of rows, before and after a temperature.

    `log_probabilities` are float [rows, labels], or of the predicted label alone, [rows], which allows no temperature;
    `is_right` is bool [rows].
    """
    if log_probabilities.ndim == 1:
        temperature, best = None, log_probabilities
    else:
        best = log_probabilities.max(1)
    bins, after = reliability(np.exp(best), is_right), None
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
