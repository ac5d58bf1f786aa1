"""Scores of answers that a language model has written, against the right ones: chrF and exact match."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.chrf import CHRF

from indictune.evaluation.breakdown import Group
from indictune.evaluation.intervals import estimate, resampled_sums
from indictune.evaluation.sums import Scored


def written_answers(answers: Sequence[str], references: Sequence[str]) -> Scored:
    """Scores written answers, [rows] each.

    chrF compares character n-grams, so it reads every script. It goes from 0 to 100, and is that of all answers
    together, as sacreBLEU counts it. Exact match is the share of answers that equal the right one; line
    breaks and extra spaces are ignored.
    """
    metric = CHRF()
    # By sacreBLEU's (2.6) own parts: only whole corpora are public, and an interval needs the counts of each answer.
    counts = np.array(metric._extract_corpus_statistics(answers, [references]), np.float64)
    is_same = np.array([ours.split() == right.split() for ours, right in zip(answers, references, strict=True)])

    def group(rows: np.ndarray) -> Group:
        chosen = [*counts[rows].T, is_same[rows].astype(np.float64)]
        samples, whole = resampled_sums(chosen), np.array([each.sum() for each in chosen])
        drawn = np.array([metric._compute_f_score(each) for each in samples[:, :-1].tolist()])
        chrf = estimate(metric._compute_f_score(whole[:-1].tolist()), drawn)
        return Group(
            len(rows), {"chrf": chrf, "exact_match": estimate(whole[-1] / len(rows), samples[:, -1] / len(rows))}
        )

    return group
