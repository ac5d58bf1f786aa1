"""Scores that follow from sums over rows: of predicted numbers, of answers as given, and of answers as written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from indictune.evaluation.breakdown import Group, Scorer
from indictune.evaluation.intervals import RESAMPLES, Estimate, estimate, ratio, ratio_of_sums, resampled_sums
from indictune.upstream import chrf_counts, chrf_of


def numbers(predictions: np.ndarray, references: np.ndarray) -> Scorer:
    """Scores predicted numbers, each [rows]: Pearson, Spearman (0 where one side is constant), mean absolute error.

    The interval of Spearman is that of Bonett and Wright (2000), which needs no resampled ranks.
    """

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        sides = [np.asarray(side, np.float64)[rows] for side in (predictions, references)]
        mae = ratio_of_sums(np.abs(sides[0] - sides[1]), np.ones(len(rows)), draws)
        scores = {"pearson": _pearson(sides[0], sides[1], draws), "spearman": _spearman(sides[0], sides[1], draws)}
        return Group(len(rows), scores | {"mae": mae})

    return group


def _pearson(first: np.ndarray, second: np.ndarray, draws: int) -> Estimate:
    value = _correlation(first, second)
    first, second = first - first.mean(), second - second.mean()
    products = [np.ones(len(first)), first, second, first * first, second * second, first * second]
    total, x, y, xx, yy, xy = resampled_sums(products, draws).T
    below = np.maximum(xx - x * x / total, 0) * np.maximum(yy - y * y / total, 0)
    return estimate(value, ratio(xy - x * y / total, np.sqrt(below)))


def _spearman(first: np.ndarray, second: np.ndarray, draws: int) -> Estimate:
    value, rows = _correlation(_ranks(first), _ranks(second)), len(first)
    if not draws:
        return estimate(value, np.zeros(0))
    if rows < 4 or abs(value) >= 1:
        return Estimate(value, value if rows > 3 else -1.0, value if rows > 3 else 1.0)
    spread = NormalDist().inv_cdf(0.975) * math.sqrt((1 + value**2 / 2) / (rows - 3))
    return Estimate(value, math.tanh(math.atanh(value) - spread), math.tanh(math.atanh(value) + spread))


def _ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value from 1; equal values share the mean of their ranks, and a NaN has none."""
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = np.where(np.isnan(values), np.nan, (counts.cumsum() - (counts - 1) / 2)[number])
    return ranks


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's r from -1 to 1; 0 where one side is constant or has a NaN."""
    if not all(np.ptp(side) > 0 for side in (first, second)):
        return 0.0
    first, second = first - first.mean(), second - second.mean()
    r = ratio((first * second).sum(), math.sqrt((first**2).sum() * (second**2).sum()))
    return float(np.clip(r, -1, 1))


def answers(losses: np.ndarray, tokens: np.ndarray, right: np.ndarray) -> Scorer:
    """Scores answers that were given: loss a token in nats, and the share of tokens predicted right.

    Tokens are summed before anything is divided. So a long answer counts by its length, and the numbers do not depend
    on how rows were put into batches. `num_tokens` is how many tokens count.

    Args:
        losses: summed cross-entropy in nats, [rows].
        tokens: that count, [rows].
        right: tokens predicted right, [rows].
    """

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        loss, count, hits = (each[rows].astype(np.float64) for each in (losses, tokens, right))
        above = {"loss": loss, "answer_token_accuracy": hits}
        scores = {name: ratio_of_sums(each, count, draws) for name, each in above.items()}
        return Group(len(rows), scores, counts={"num_tokens": int(count.sum())})

    return group


def written_answers(answers: Sequence[str], references: Sequence[str]) -> Scorer:
    """Scores answers that the model wrote, [rows] each.

    chrF compares character n-grams, so it reads every script. It goes from 0 to 100, and is that of all answers
    together, as sacreBLEU counts it. Exact match is the share of answers that equal the right one; line
    breaks and extra spaces are ignored.
    """
    from sacrebleu.metrics.chrf import CHRF  # slow to import

    metric = CHRF()
    counts = np.array(chrf_counts(metric, answers, references), np.float64)
    is_same = np.array([ours.split() == right.split() for ours, right in zip(answers, references, strict=True)])

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        columns, whole = list(counts[rows].T), counts[rows].sum(0)
        drawn = [chrf_of(metric, each) for each in resampled_sums(columns, draws).tolist()]
        chrf = estimate(chrf_of(metric, whole.tolist()), np.array(drawn))
        same = ratio_of_sums(is_same[rows].astype(np.float64), np.ones(len(rows)), draws)
        return Group(len(rows), {"chrf": chrf, "exact_match": same})

    return group
