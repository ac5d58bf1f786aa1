"""Metrics of predicted numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr

from indictune.evaluation.metrics import rows_of_languages


def regression_metrics(
    predictions: np.ndarray, references: np.ndarray, losses: np.ndarray, languages: Sequence[str]
) -> dict[str, Any]:
    """Score predicted numbers, overall and per language.

    Args:
        predictions: float [rows].
        references: float [rows].
        losses: of each row, float [rows].
        languages: of each row, [rows].

    Returns:
        `num_examples`, `loss`, `pearson` and `spearman` (correlations, 0 where one side is constant), `mae` (mean
        absolute error), and `per_language.<language>` with the same scores.
    """
    predictions, references = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    return {
        "num_examples": len(references),
        "loss": math.fsum(np.asarray(losses, np.float64).tolist()) / len(references),
        **_scores(predictions, references),
        "per_language": {
            language: {"num_examples": int(rows.sum()), **_scores(predictions[rows], references[rows])}
            for language, rows in rows_of_languages(languages).items()
        },
    }


def _scores(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    varies = len(references) > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
    return {
        "pearson": float(pearsonr(predictions, references).statistic) if varies else 0.0,
        "spearman": float(spearmanr(predictions, references).statistic) if varies else 0.0,
        "mae": float(np.abs(predictions - references).mean()),
    }
