"""Metrics of texts that may have several labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from indictune.evaluation.metrics import label_scores, scores_by_language

THRESHOLDS = [percent / 100 for percent in range(5, 96)]


def best_threshold(probabilities: np.ndarray, references: np.ndarray) -> float:
    """The threshold of 0.05, 0.06 .. 0.95 with the best micro-F1; of equal ones the nearest to 0.5.

    Args:
        probabilities: float [rows, labels].
        references: 0 or 1 [rows, labels].
    """
    by_distance: list[float] = sorted(THRESHOLDS, key=lambda threshold: abs(threshold - 0.5))
    return max(by_distance, key=lambda threshold: _micro_f1(probabilities >= threshold, references))


def _micro_f1(predicted: np.ndarray, references: np.ndarray) -> float:
    """F1 over all labels of all rows: 2 TP / (2 TP + FP + FN); 0 without any label."""
    hits, all_labels = int((predicted & (references > 0)).sum()), int(predicted.sum()) + int(references.sum())
    return 2 * hits / all_labels if all_labels else 0.0


def multi_label_metrics(
    probabilities: np.ndarray,
    references: np.ndarray,
    losses: np.ndarray,
    languages: Sequence[str],
    label_names: Sequence[str],
    threshold: float,
) -> dict[str, Any]:
    """Score several labels a row. The other arguments are those of `classification_metrics`.

    Args:
        probabilities: float [rows, labels].
        references: 0 or 1 [rows, labels].
        threshold: a label is predicted if its probability reaches it.

    Returns:
        `scores_by_language` with `micro_f1` and `macro_f1`, `threshold`, and `per_label`.
    """
    from sklearn.metrics import f1_score, precision_recall_fscore_support  # slow to import

    predicted = probabilities >= threshold

    def score(rows: np.ndarray) -> dict[str, float]:
        return {
            "micro_f1": _micro_f1(predicted[rows], references[rows]),
            "macro_f1": float(f1_score(references[rows], predicted[rows], average="macro", zero_division=0)),
        }

    columns = precision_recall_fscore_support(references, predicted, zero_division=0)
    scores = scores_by_language(score, losses, languages)
    return scores | {"threshold": threshold, "per_label": label_scores(columns, label_names)}
