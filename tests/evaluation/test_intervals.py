"""How often the intervals of each kind of score cover the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from indictune.evaluation.scorers import LabelCounts, group_of_counts, numbers, one_label, several_labels
from indictune.evaluation.uncertainty import Estimate
from tests.evaluation.drawing import LABELS, drawn


# The standard deviation of a share of 200 trials of 0.95 is 0.015.
def covered(score: Callable[[int], tuple[Estimate, float]], trials: int = 200) -> float:
    """How often an interval holds the true value."""
    pairs = [score(seed) for seed in range(trials)]
    return sum(estimate.low <= truth <= estimate.high for estimate, truth in pairs) / trials


def test_intervals_of_macro_f1_cover_at_the_stated_rate() -> None:
    truth = one_label(*drawn(2_000_000, 10**6), LABELS)(np.arange(2_000_000), 0).scores["macro_f1"].value

    def one(seed: int) -> tuple[Estimate, float]:
        return one_label(*drawn(300, seed), LABELS)(np.arange(150)).scores["macro_f1"], truth

    assert 0.91 <= covered(one) <= 0.99


def test_intervals_of_sums_over_blocks_of_rows_cover_at_the_stated_rate() -> None:
    """5,000 rows in 1,000 blocks. Of normal errors, the mean absolute one is the root of 2 / pi."""

    def one(seed: int) -> tuple[Estimate, float]:
        errors = np.random.default_rng(seed).normal(size=5_000)
        group = numbers(errors, np.zeros(5_000))(np.arange(5_000))
        return group.scores["mae"], float(np.sqrt(2 / np.pi))

    assert 0.9 <= covered(one, 60) <= 1


def test_intervals_of_both_correlations_cover_at_the_stated_rate() -> None:
    """Of two normal variables with correlation 0.6: Spearman's is 6 / pi times the arc sine of 0.3."""
    truths = {"pearson": 0.6, "spearman": 6 / np.pi * np.arcsin(0.3)}
    groups = []
    for seed in range(150):
        first, other = np.random.default_rng(seed).normal(size=(2, 200))
        groups.append(numbers(0.6 * first + 0.8 * other, first)(np.arange(200)))
    for name, truth in truths.items():
        inside = [group.scores[name].low <= truth <= group.scores[name].high for group in groups]
        assert 0.91 <= np.mean(inside) <= 0.98, name


@pytest.mark.more
def test_intervals_of_several_labels_and_of_entities_cover_at_the_stated_rate() -> None:
    """Each of 3 labels is right in 4 of 10 rows, then found in 8 of 10, and given to 1 in 10 of the others."""
    truth = 2 * 0.4 * 0.8 / (0.4 + 0.4 * 0.8 + 0.6 * 0.1)

    def one(seed: int) -> tuple[Estimate, float]:
        random = np.random.default_rng(seed)
        right = random.random((200, 3)) < 0.4
        given = random.random((200, 3)) < np.where(right, 0.8, 0.1)
        if seed % 2:
            return several_labels(given, right, LABELS)(np.arange(200)).scores["micro_f1"], truth
        counts = LabelCounts(right, given, right & given)
        return group_of_counts(counts, LABELS, ("f1", None), 1_000).scores["f1"], truth

    assert 0.91 <= covered(one, 300) <= 0.98
