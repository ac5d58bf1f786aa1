"""Scores of numbers and answers: against scipy and sacreBLEU, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from scipy.stats import pearsonr, spearmanr

from indictune.evaluation.scorers import answers, numbers, written_answers
from indictune.evaluation.uncertainty import Estimate

REFERENCES = ["आज मौसम अच्छा है", "vanakkam nanba", "the sky is blue", "42"]
ANSWERS = ["आज मौसम खराब है", "vanakkam  nanba\n", "", "forty two"]


def test_correlations_agree_with_scipy() -> None:
    random = np.random.default_rng(4)
    right = random.integers(0, 5, 300) / 2  # with ties
    predicted = (right + random.normal(size=300)).astype(np.float32)
    for rows in (np.arange(300), np.array([3, 7]), np.arange(50, 60)):
        found = numbers(predicted, right)(rows).scores
        sides = predicted[rows].astype(np.float64), right[rows]
        assert found["pearson"].value == pytest.approx(pearsonr(*sides).statistic, rel=1e-13)
        assert found["spearman"].value == pytest.approx(spearmanr(*sides).statistic, rel=1e-13)
        assert found["mae"].value == np.abs(sides[0] - sides[1]).mean()


@pytest.mark.filterwarnings("error")
def test_a_constant_or_a_nan_has_no_correlation() -> None:
    for predicted in (np.full(3, 0.1), np.array([1.0, np.nan, 2.0])):
        scores = numbers(predicted, np.array([0.1, 0.7, 0.9]))(np.arange(3), 0).scores
        assert (scores["pearson"].value, scores["spearman"].value) == (0, 0)
    assert numbers(np.ones(1), np.ones(1))(np.arange(1)).scores["pearson"].value == 0


def test_answers_are_scored_by_token() -> None:
    found = answers(np.array([2.0, 6.0]), np.array([1, 3]), np.array([0, 3]))(np.arange(2))
    assert found.scores == {"loss": Estimate(2, 2, 2), "answer_token_accuracy": Estimate(0.75, 0, 1)}
    assert found.counts == {"num_tokens": 4}


def test_written_answers_agree_with_sacrebleu_on_any_rows() -> None:
    scored = written_answers(ANSWERS, REFERENCES)
    for rows in ([0, 1, 2, 3], [0], [1, 3], [2]):
        found = scored(np.array(rows))
        wanted = sacrebleu.corpus_chrf([ANSWERS[row] for row in rows], [[REFERENCES[row] for row in rows]])
        assert found.scores["chrf"].value == pytest.approx(wanted.score)
        assert found.num_examples == len(rows)
    assert scored(np.arange(4)).scores["exact_match"].value == 0.25  # white space does not count


def test_an_interval_holds_the_score_and_one_answer_has_no_width() -> None:
    scored = written_answers(ANSWERS * 20, REFERENCES * 20)
    chrf = scored(np.arange(80)).scores["chrf"]
    assert 0 < chrf.low < chrf.value < chrf.high < 100
    one = scored(np.array([0])).scores["chrf"]
    assert one.low == one.value == one.high
