"""Metrics of numbers and of several labels a row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from indictune.evaluation.multi_label import best_threshold, multi_label_metrics
from indictune.evaluation.regression import regression_metrics


def test_correlations_and_errors_of_numbers() -> None:
    scores = regression_metrics(
        np.array([1.0, 2, 4, 3]), np.array([1.0, 2, 3, 8]), np.array([0.0, 0, 1, 25]), ["hi", "hi", "ta", "ta"]
    )
    assert scores["loss"] == 6.5
    assert scores["mae"] == 1.5
    assert scores["pearson"] == pytest.approx(6 / math.sqrt(5 * 29))  # sums of products of the distances to the means
    assert scores["spearman"] == pytest.approx(0.8)  # 1 - 6 (0 + 0 + 1 + 1) / (4 (16 - 1))
    assert scores["per_language"]["ta"] == pytest.approx({"num_examples": 2, "pearson": -1, "spearman": -1, "mae": 3})


def test_a_constant_has_no_correlation() -> None:
    scores = regression_metrics(np.ones(3), np.array([1.0, 2, 3]), np.zeros(3), ["hi"] * 3)
    assert (scores["pearson"], scores["spearman"], scores["mae"]) == (0, 0, 1)


PROBABILITIES = np.array([[0.9, 0.3], [0.3, 0.1], [0.1, 0.35]])
REFERENCES = np.array([[1, 1], [0, 0], [0, 1]])


def test_f1_of_all_labels_and_of_each() -> None:
    scores = multi_label_metrics(PROBABILITIES, REFERENCES, np.ones(3), ["hi", "hi", "ta"], ["a", "b"], 0.3)
    assert scores["micro_f1"] == pytest.approx(2 * 3 / (2 * 3 + 1))
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)
    assert scores["per_label"]["a"] == {"precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3), "support": 1}
    assert scores["per_language"]["ta"]["micro_f1"] == 1


def test_the_best_threshold_is_fitted() -> None:
    assert best_threshold(np.array([[0.2, 0.1], [0.22, 0.15]]), np.array([[1, 0], [1, 0]])) == 0.2
    assert best_threshold(np.array([[0.8], [0.2]]), np.array([[1], [0]])) == 0.5  # of all that are as good
