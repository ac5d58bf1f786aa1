"""The baseline of a run's classifier: character n-grams and logistic regression, which learn in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import compress

import numpy as np
from datasets import Dataset

from indictune.evaluation.comparison import compare, verdict
from indictune.files import BASELINE, write_json
from indictune.progress import OWN_PROGRESS
from indictune.run import Run
from indictune.tasks.protocol import Tokens

MAX_CHARACTERS = 2_000_000  # some 10 seconds on one CPU core
MIN_ROWS = 100  # fewer training rows say nothing of a model
_NGRAMS = (2, 5)


def add_baseline(run: Run, tokens: Tokens, split: str, dataset: Dataset, predicted: np.ndarray) -> None:
    """Train the baseline, write `baseline.json`, and show it next to the model; one process calls it.

    Args:
        run: its folder gets the file.
        tokens: of the run, with one label a row.
        split: that is scored, `validation` or `test`.
        dataset: its tokenised rows.
        predicted: class ids by the model, int [rows].
    """
    if len(tokens.train) < MIN_ROWS:
        return
    OWN_PROGRESS.passed("training the baseline")
    began = time.monotonic()
    train, scored = tokens.origins["train"], tokens.origins[split]
    learned, labelled = chosen_rows(train.texts), chosen_rows(scored.texts)
    by_ngrams = predicted_by_ngrams(
        compress(train.texts, learned), _labels(tokens.train)[learned], compress(scored.texts, labelled)
    )
    languages = list(compress(dataset["language"][:], labelled))
    found = compare(_labels(dataset)[labelled], by_ngrams, predicted[labelled], languages)
    seconds = time.monotonic() - began
    rows = {"train_rows": int(learned.sum()), "of_train_rows": len(learned)}
    rows |= {"rows": int(labelled.sum()), "of_rows": len(labelled)}
    content = {"model": "character n-grams 2 to 5, TF-IDF, logistic regression", "split": split, "seconds": seconds}
    write_json(run.output_dir / BASELINE, content | rows | asdict(found))
    scores = f"macro_f1 {found.overall.first:.4f}, the model's {found.overall.second:.4f}"
    first = f"baseline, {content['model']} ({seconds:.1f} s): {scores}"
    less = [
        f"{what} {count:,} of {whole:,} {name} rows"
        for what, name, count, whole in (
            ("It learned", "training", rows["train_rows"], rows["of_train_rows"]),
            ("Both labelled", split, rows["rows"], rows["of_rows"]),
        )
        if count < whole
    ]
    sentence = verdict(found, ("the baseline", "the model")).partition("\n")[0]
    run.show("\n".join([f"\n{first}", *(f"{each}." for each in less), sentence[0].upper() + sentence[1:]]))


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
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import
    from sklearn.linear_model import LogisticRegression

    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=_NGRAMS, sublinear_tf=True, min_df=2, dtype=np.float32)
    features = ngrams.fit_transform(texts)
    model = LogisticRegression(max_iter=1_000, tol=1e-3).fit(features, labels)
    predicted: np.ndarray = model.predict(ngrams.transform(others))
    return predicted


def _labels(dataset: Dataset) -> np.ndarray:
    labels: np.ndarray = dataset.data["labels"].to_numpy()
    return labels
