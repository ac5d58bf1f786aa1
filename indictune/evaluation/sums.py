"""Scores that follow from sums over rows, with intervals: of numbers, several labels, entities and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import norm, rankdata

from indictune.evaluation.breakdown import Group
from indictune.evaluation.confusion import LabelCounts, scores_of_labels
from indictune.evaluation.intervals import Estimate, estimate, ratio, resampled_sums

Scored = Callable[[np.ndarray], Group]


def numbers(predictions: np.ndarray, references: np.ndarray) -> Scored:
    """Scores predicted numbers, each [rows]: Pearson, Spearman and mean absolute error.

    The interval of Spearman is that of Bonett and Wright (2000), which needs no resampled ranks.
    """

    def group(rows: np.ndarray) -> Group:
        sides = [np.asarray(side, np.float64)[rows] for side in (predictions, references)]
        errors = np.abs(sides[0] - sides[1])
        sums = resampled_sums([np.ones(len(rows)), errors])
        scores = {"pearson": _pearson(*sides), "spearman": _spearman(*sides)}
        return Group(len(rows), scores | {"mae": estimate(errors.mean(), ratio(sums[:, 1], sums[:, 0]))})

    return group


def _pearson(first: np.ndarray, second: np.ndarray) -> Estimate:
    first, second = first - first.mean(), second - second.mean()
    products = [np.ones(len(first)), first, second, first * first, second * second, first * second]
    return estimate(_pearson_value(first, second), _correlation(resampled_sums(products)))


def _correlation(sums: np.ndarray) -> np.ndarray:
    """Correlations from the sums of 1, x, y, xx, yy and xy, [samples, 6]; 0 where one side is constant."""
    rows, x, y, xx, yy, xy = sums.T
    below = np.maximum(xx - x * x / rows, 0) * np.maximum(yy - y * y / rows, 0)
    return ratio(xy - x * y / rows, np.sqrt(below))


def _spearman(first: np.ndarray, second: np.ndarray) -> Estimate:
    value, rows = _pearson_value(rankdata(first), rankdata(second)), len(first)
    if rows < 4 or abs(value) >= 1:
        return Estimate(value, value if rows > 3 else -1.0, value if rows > 3 else 1.0)
    spread = float(norm.ppf(0.975)) * math.sqrt((1 + value**2 / 2) / (rows - 3))
    return Estimate(value, math.tanh(math.atanh(value) - spread), math.tanh(math.atanh(value) + spread))


def _pearson_value(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first - first.mean(), second - second.mean()
    return float(ratio((first * second).sum(), math.sqrt((first**2).sum() * (second**2).sum())))


def several_labels(predicted: np.ndarray, references: np.ndarray, labels: list[str]) -> Scored:
    """Scores several labels a row, bool or 0 and 1 [rows, labels]: micro-F1, macro-F1, and those of each label."""

    def group(rows: np.ndarray) -> Group:
        given, right = predicted[rows] > 0, references[rows] > 0
        return counted(right, given, right & given, labels, "micro_f1", "macro_f1")

    return group


def entities(present: np.ndarray, predicted: np.ndarray, hits: np.ndarray, kinds: list[str]) -> Scored:
    """Scores entities, from their counts in each sentence, int [sentences, kinds]: F1, precision, recall."""

    def group(rows: np.ndarray) -> Group:
        return counted(present[rows], predicted[rows], hits[rows], kinds, "f1", None)

    return group


def counted(
    present: np.ndarray, predicted: np.ndarray, hits: np.ndarray, labels: list[str], micro: str, macro: str | None
) -> Group:
    """Scores from counts of each row, [rows, labels]; `micro` and `macro` name the F1 of all counts and their mean."""
    parts = (present, predicted, hits)
    samples = LabelCounts(*(resampled_sums(list(part.T)) if len(labels) else np.zeros((1, 0)) for part in parts))
    counts = LabelCounts(*(part.sum(0, dtype=np.int64) for part in parts))
    names = (micro, "precision", "recall")
    scores = {name: estimate(float(a), b) for name, a, b in zip(names, _micro(counts), _micro(samples), strict=True)}
    if macro is not None:
        scores[macro] = estimate(counts.scores()[2].mean(), samples.scores()[2].mean(-1))
    return Group(len(present), scores, scores_of_labels(counts, samples, labels))


def _micro(counts: LabelCounts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """F1, precision and recall of all labels together."""
    present, predicted, hits = (each.sum(-1) for each in (counts.present, counts.predicted, counts.hits))
    return ratio(2 * hits, present + predicted), ratio(hits, predicted), ratio(hits, present)


def answers(losses: np.ndarray, tokens: np.ndarray, right: np.ndarray) -> Scored:
    """Scores answers from the summed loss, tokens and right tokens of each row, [rows]: loss a token, and accuracy."""

    def group(rows: np.ndarray) -> Group:
        columns: Sequence[np.ndarray] = [each[rows].astype(np.float64) for each in (losses, tokens, right)]
        sums, (loss, count, hits) = resampled_sums(columns), (each.sum() for each in columns)
        scores = {"loss": estimate(float(ratio(loss, count)), ratio(sums[:, 0], sums[:, 1]))}
        accuracy = estimate(float(ratio(hits, count)), ratio(sums[:, 2], sums[:, 1]))
        return Group(len(rows), scores | {"answer_token_accuracy": accuracy})

    return group
