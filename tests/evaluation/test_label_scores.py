"""Scores of one label a row and of several, against scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_fscore_support

from indictune.evaluation.scorers import Confusion, best_threshold, one_label, several_labels
from indictune.evaluation.uncertainty import Estimate
from tests.evaluation.drawing import LABELS


def test_a_label_without_rows_or_predictions_leaves_the_macro_scores_alone() -> None:
    group = one_label(np.array([0, 0, 2, 2]), np.array([0, 2, 2, 2]), LABELS)(np.arange(4))
    assert group.scores["macro_f1"].value == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert group.per_label["neutral"].f1 == Estimate(0, 0, 0)


def test_counts_of_many_labels_are_those_of_the_rows() -> None:
    references, predictions = np.random.default_rng(5).integers(0, 200, (2, 500))
    confusion = Confusion.of_rows(references, predictions, 200)
    counts = confusion.label_counts(confusion.counts)
    hits = references[references == predictions]
    for found, labels in ((counts.present, references), (counts.predicted, predictions), (counts.hits, hits)):
        assert found.tolist() == np.bincount(labels, minlength=200).tolist()
    assert confusion.matrix() is None
    assert confusion.drawn(7).present.sum(1).tolist() == [500] * 7


def test_several_labels_agree_with_scikit_learn() -> None:
    random, labels = np.random.default_rng(3), ["a", "b", "c", "d"]
    references, predicted = random.random((2, 300, 4)) < 0.3
    group = several_labels(predicted, references, labels)(np.arange(300))
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro")):
        score = group.scores[name]
        assert score.value == pytest.approx(f1_score(references, predicted, average=average), rel=1e-15)
        assert score.low < score.value < score.high
    for label, columns in zip(
        labels, zip(*precision_recall_fscore_support(references, predicted), strict=True), strict=True
    ):
        found = group.per_label[label]
        assert (found.precision.value, found.recall.value, found.f1.value, found.support) == columns


def test_the_best_threshold_is_fitted() -> None:
    assert best_threshold(np.array([[0.2, 0.1], [0.22, 0.15]]), np.array([[1, 0], [1, 0]])) == 0.2
    assert best_threshold(np.array([[0.8], [0.2]]), np.array([[1], [0]])) == 0.5  # of all that are as good
