"""A classifier that learns in seconds, to compare a model with: character n-grams and logistic regression."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

MAX_CHARACTERS = 2_000_000  # some 10 seconds on one CPU core
_NGRAMS = (2, 5)


def chosen_rows(texts: Iterable[str]) -> np.ndarray:
    """As many random rows as have two million characters together, the same each time; bool [rows]."""
    lengths = np.fromiter(map(len, texts), np.int64)
    order = np.random.default_rng(0).permutation(len(lengths))
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[order[: 1 + np.searchsorted(lengths[order].cumsum(), MAX_CHARACTERS)]] = True
    return chosen


def predicted_by_ngrams(texts: Iterable[str], labels: np.ndarray, others: Iterable[str]) -> np.ndarray:
    """What a logistic regression on TF-IDF of character n-grams, 2 to 5 within words, predicts.

    Args:
        texts: to learn from.
        labels: of these, int [texts].
        others: to label.

    Returns:
        Class ids, int [others].
    """
    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=_NGRAMS, sublinear_tf=True, min_df=2, dtype=np.float32)
    features = ngrams.fit_transform(texts)
    model = LogisticRegression(max_iter=1_000, tol=1e-3).fit(features, labels)
    predicted: np.ndarray = model.predict(ngrams.transform(others))
    return predicted
