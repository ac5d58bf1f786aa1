"""Metrics of predicted numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from indictune.evaluation.metrics import scores_by_language


def regression_metrics(
    predictions: np.ndarray, references: np.ndarray, losses: np.ndarray, languages: Sequence[str]
) -> dict[str, Any]:
    """Score predicted numbers; all arguments are [rows].

    Returns:
        `scores_by_language` with `pearson` and `spearman` (correlations, 0 where one side is constant) and `mae` (mean
        absolute error).
    """
    predicted, right = np.asarray(predictions, np.float64), np.asarray(references, np.float64)

    def score(rows: np.ndarray) -> dict[str, float]:
        sides = predicted[rows], right[rows]
        varies = rows.sum() > 1 and all(np.ptp(side) > 0 for side in sides)
        return {
            "pearson": float(pearsonr(*sides).statistic) if varies else 0.0,
            "spearman": float(spearmanr(*sides).statistic) if varies else 0.0,
            "mae": float(np.abs(sides[0] - sides[1]).mean()),
        }

    return scores_by_language(score, losses, languages)
