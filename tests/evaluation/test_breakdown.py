"""Scores for whom: against scikit-learn and seqeval, and how often their intervals cover the truth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from seqeval.metrics import f1_score as entity_f1
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

from indictune.evaluation import sums
from indictune.evaluation.breakdown import Group, RowFacts, as_json, break_down, read_breakdowns
from indictune.evaluation.calibration import calibration_of
from indictune.evaluation.confusion import Confusion, group_of_confusion
from indictune.evaluation.entities import entity_scores
from indictune.evaluation.intervals import Estimate

LABELS = ["negative", "neutral", "positive"]


def drawn(rows: int, seed: int, right: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and predictions that are right as often as this or by luck."""
    random = np.random.default_rng(seed)
    references = random.choice(3, rows, p=[0.5, 0.3, 0.2])
    guessed = random.integers(0, 3, rows)
    return references, np.where(random.random(rows) < right, references, guessed)


def of_labels(references: np.ndarray, predictions: np.ndarray) -> Callable[[np.ndarray], Group]:
    return lambda rows: group_of_confusion(Confusion.of_rows(references[rows], predictions[rows], 3), LABELS)


def test_each_group_agrees_with_scikit_learn() -> None:
    references, predictions = drawn(400, 1)
    languages = np.array(["hi", "ta"])[np.arange(400) % 2]
    scripts = np.array(["native", "romanised"])[np.arange(400) // 200]
    facts = RowFacts(languages.tolist(), scripts.tolist(), np.arange(400) % 70 + 1)
    found = break_down("single_label", facts, of_labels(references, predictions), LABELS)
    assert list(found.by["length"]) == ["1-16", "17-32", "33-64", "65-128"]
    for mask, group in (
        (np.full(400, True), found.overall),
        (languages == "ta", found.by["language"]["ta"]),
        (scripts == "romanised", found.by["script"]["romanised"]),
        (facts.lengths <= 16, found.by["length"]["1-16"]),
        (facts.lengths > 64, found.by["length"]["65-128"]),
    ):
        sides = references[mask], predictions[mask]
        macro = precision_recall_fscore_support(*sides, average="macro")
        assert group.num_examples == mask.sum()
        assert [group.scores[f"macro_{name}"].value for name in ("precision", "recall", "f1")] == pytest.approx(
            macro[:3]
        )
        assert group.scores["accuracy"].value == pytest.approx(accuracy_score(*sides))
        assert group.confusion == confusion_matrix(*sides, labels=range(3)).tolist()
        for at, columns in enumerate(zip(*precision_recall_fscore_support(*sides, labels=range(3)), strict=True)):
            label = group.per_label[LABELS[at]]
            assert [label.precision.value, label.recall.value, label.f1.value] == pytest.approx(columns[:3])
            assert label.support == columns[3]
    worst = min(
        ("hi", "ta"),
        key=lambda language: f1_score(
            references[languages == language], predictions[languages == language], average="macro"
        ),
    )
    assert found.worst_language == worst


def test_a_label_without_rows_or_predictions_leaves_the_macro_scores_alone() -> None:
    group = of_labels(np.array([0, 0, 2, 2]), np.array([0, 2, 2, 2]))(np.arange(4))
    assert group.scores["macro_f1"].value == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert group.per_label["neutral"].f1 == Estimate(0, 0, 0)


# The standard deviation of a share of 400 trials of 0.95 is 0.011.
def covered(score: Callable[[int], tuple[Estimate, float]], trials: int = 400) -> float:
    """How often an interval holds the true value."""
    pairs = [score(seed) for seed in range(trials)]
    return sum(estimate.low <= truth <= estimate.high for estimate, truth in pairs) / trials


def test_intervals_of_macro_f1_cover_at_the_stated_rate() -> None:
    truth = group_of_confusion(Confusion.of_rows(*drawn(2_000_000, 10**6), 3), LABELS).scores["macro_f1"].value

    def one(seed: int) -> tuple[Estimate, float]:
        return group_of_confusion(Confusion.of_rows(*drawn(300, seed), 3), LABELS).scores["macro_f1"], truth

    assert 0.92 <= covered(one) <= 0.98


def test_intervals_of_sums_over_blocks_of_rows_cover_at_the_stated_rate() -> None:
    """5,000 rows in 1,000 blocks. Of normal errors, the mean absolute one is the root of 2 / pi."""

    def one(seed: int) -> tuple[Estimate, float]:
        errors = np.random.default_rng(seed).normal(size=5_000)
        group = sums.numbers(errors, np.zeros(5_000))(np.arange(5_000))
        return group.scores["mae"], float(np.sqrt(2 / np.pi))

    assert 0.9 <= covered(one, 100) <= 1


def test_intervals_of_both_correlations_cover_at_the_stated_rate() -> None:
    """Of two normal variables with correlation 0.6: Spearman's is 6 / pi times the arc sine of 0.3."""
    truths = {"pearson": 0.6, "spearman": 6 / np.pi * np.arcsin(0.3)}
    groups = []
    for seed in range(300):
        first, other = np.random.default_rng(seed).normal(size=(2, 200))
        groups.append(sums.numbers(0.6 * first + 0.8 * other, first)(np.arange(200)))
    for name, truth in truths.items():
        inside = [group.scores[name].low <= truth <= group.scores[name].high for group in groups]
        assert 0.91 <= np.mean(inside) <= 0.98, name


def test_intervals_of_several_labels_and_of_entities_cover_at_the_stated_rate() -> None:
    """Each of 3 labels is right in 4 of 10 rows, then found in 8 of 10, and given to 1 in 10 of the others."""
    truth = 2 * 0.4 * 0.8 / (0.4 + 0.4 * 0.8 + 0.6 * 0.1)

    def one(seed: int) -> tuple[Estimate, float]:
        random = np.random.default_rng(seed)
        right = random.random((200, 3)) < 0.4
        given = random.random((200, 3)) < np.where(right, 0.8, 0.1)
        if seed % 2:
            return sums.several_labels(given, right, ["a", "b", "c"])(np.arange(200)).scores["micro_f1"], truth
        return sums.entities(right, given, right & given, ["a", "b", "c"])(np.arange(200)).scores["f1"], truth

    assert 0.91 <= covered(one, 300) <= 0.98


def test_several_labels_and_answers_agree_with_scores_of_all_rows() -> None:
    random = np.random.default_rng(3)
    references, predicted = random.random((2, 300, 4)) < 0.3
    group = sums.several_labels(predicted, references, ["a", "b", "c", "d"])(np.arange(300))
    for name, average in (("micro_f1", "micro"), ("macro_f1", "macro")):
        score = group.scores[name]
        assert score.value == pytest.approx(f1_score(references, predicted, average=average))
        assert score.low < score.value < score.high
    answered = sums.answers(np.array([2.0, 6.0]), np.array([1, 3]), np.array([0, 3]))(np.arange(2))
    assert answered.scores["loss"] == Estimate(2, 2, 2)
    assert answered.scores["answer_token_accuracy"] == Estimate(0.75, 0, 1)


def test_entities_agree_with_seqeval() -> None:
    tags = ["O", "B-PER", "I-PER", "B-LOC"]
    references = [[1, 2, 0], [3, 0, 3], [0, 0, 0]]
    predictions = np.array([[1, 2, 0], [3, 3, 0], [0, 1, -100]])
    read = [[True] * 3, [True] * 3, [True, True, False]]
    group = entity_scores(predictions, references, read, tags)(np.arange(3))
    right = [[tags[tag] for tag in row] for row in references]
    found = [[tags[max(tag, 0)] for tag in row] for row in predictions]
    assert group.scores["f1"].value == pytest.approx(entity_f1(right, found))
    assert {kind: each.support for kind, each in group.per_label.items()} == {"LOC": 2, "PER": 1}
    assert group.per_label["LOC"].recall.value == 0.5


def test_a_program_reads_what_was_written(tmp_path: Path) -> None:
    references, predictions = drawn(50, 2)
    sure = np.log(np.full((50, 3), 1 / 3))
    facts = RowFacts(["hi"] * 50, None, np.ones(50, np.int64))
    calibration = calibration_of(sure, references == predictions, 1.5)
    found = break_down("single_label", facts, of_labels(references, predictions), LABELS, calibration)
    (tmp_path / "evaluation.json").write_text(json.dumps(as_json({"test": found})), encoding="utf-8")
    assert read_breakdowns(tmp_path) == {"test": found}
