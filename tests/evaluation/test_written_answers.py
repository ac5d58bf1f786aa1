"""Scores of written answers: against sacreBLEU, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu

from indictune.evaluation.written_answers import written_answers

REFERENCES = ["आज मौसम अच्छा है", "vanakkam nanba", "the sky is blue", "42"]
ANSWERS = ["आज मौसम खराब है", "vanakkam  nanba\n", "", "forty two"]


def test_they_agree_with_sacrebleu_on_any_rows() -> None:
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
