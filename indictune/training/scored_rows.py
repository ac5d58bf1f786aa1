"""What a run writes of the rows that it scored: predictions, scores, mistakes and a baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import blake2b
from itertools import chain, compress
from typing import Any, cast

import numpy as np
from datasets import Dataset

from indictune.data.cache import counts_of, separated
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.languages import scripts_of
from indictune.errors import UserError
from indictune.evaluation import breakdown
from indictune.evaluation.comparison import compare, verdict
from indictune.evaluation.uncertainty import RESAMPLES
from indictune.files import BASELINE, PREDICTIONS, LineFile, json_line, write_json
from indictune.hub.public_text import without_folders
from indictune.run import OWN_PROGRESS, Run
from indictune.tasks.protocol import Objective, Origins, Tokens
from indictune.training.exact_trainer import ExactTrainer

BLOCK_OF_SPLIT = {split: block for block, split in breakdown.SPLITS.items()}
_ROWS_AT_ONCE = 10_000
MAX_CHARACTERS = 2_000_000  # some 10 seconds on one CPU core
MIN_ROWS = 100  # fewer training rows say nothing of a model


class Findings:
    """The files of a run's evaluations, or of those of a saved model, which rank 0 writes.

    Attributes:
        breakdowns: of the evaluations so far, by split.
        results: of the latest evaluation.
    """

    def __init__(self, run: Run, saved_model: str | None = None) -> None:
        self.run = run
        self._saved_model = saved_model
        self.breakdowns: dict[str, breakdown.Breakdown] = {}
        self.results: Sequence[np.ndarray] = ()
        self._lines: LineFile | None = None
        self._mistakes = breakdown.Mistakes()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect the evaluations of the block, and put the files into place at its end."""
        if self.run.rank != 0:
            yield
            return
        with LineFile(self.run.output_dir / PREDICTIONS) as self._lines:
            yield
        write_json(self.run.output_dir / breakdown.EVALUATION, breakdown.as_json(self.breakdowns))
        write_json(self.run.output_dir / breakdown.MISTAKES, self._mistakes.by_split())

    def evaluate(self, trainer: ExactTrainer, dataset: Dataset, split: str, origins: Origins | None) -> dict[str, Any]:
        """Evaluate the rows of `validation` or `test`, show the table, and return its block of `metrics.json`.

        All ranks must call it. Rank 0 keeps predictions and scores.

        Raises:
            UserError: a saved model computes numbers that are not finite.
        """
        objective, run, name = trainer.objective, self.run, BLOCK_OF_SPLIT[split]
        objective.keeps_scores = True
        trainer.evaluate(dataset, metric_key_prefix=name)
        block, results, trainer.measured = trainer.detailed_metrics[name], trainer.measured, None
        objective.keeps_scores = False
        if not math.isfinite(block["loss"]):
            if self._saved_model is not None:
                raise UserError("logits-not-finite", "--model", self._saved_model)
            note = f"The loss on the {split} rows is {block['loss']}: half precision may overflow on some of them."
            run.warn([note])
        own = trainer.own_scores
        names = objective.METRICS if own is None else (*objective.METRICS, *own.overall)
        run.show(f"\n{split} rows\n{breakdown.metrics_tables(block, names)}")
        assert results is not None
        written = trainer.written if trainer.samples is not None and trainer.samples.split == split else None
        if written is not None:
            block |= {score: estimate.value for score, estimate in written.overall.scores.items()}
        if self._lines is not None:
            self.results = results
            scripts = None if origins is None else scripts_of(origins.texts, dataset["language"][:])
            found = replace(objective.breakdown(dataset, results, scripts, RESAMPLES), written=written)
            found = found if own is None else own.beside(found)
            for row, text in _rows(objective, name, dataset, results, origins, scripts):
                self._lines.append(json_line(row))
                self._mistakes.add(row, *text.split(BETWEEN_TEXTS))
            self.breakdowns[name] = found
            run.show(f"\n{breakdown.in_sentences(found)}")
        return block


def _rows(
    objective: Objective,
    split: str,
    dataset: Dataset,
    results: Sequence[np.ndarray],
    origins: Origins | None,
    scripts: Sequence[str] | None,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row of `predictions.jsonl`, and its text, which is empty if the task does not know it.

    A row has `split`, `number`, `row`, `id`, `language`, `script`, `length`, and what the task gives.
    """
    texts = iter(() if origins is None else origins.texts)
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, len(dataset))
        some = dataset.select(range(start, stop))
        languages, lengths = some["language"][:], some["length"][:]
        for at, predicted in enumerate(objective.predictions(some, [each[start:stop] for each in results])):
            about: dict[str, Any] = {"split": split, "number": start + at}
            text = next(texts, "")
            if origins is not None and scripts is not None:
                digest = blake2b(text.encode(), digest_size=8).hexdigest()  # equal in all runs
                about |= {"row": origins.location(start + at), "id": digest, "script": scripts[start + at]}
            yield about | {"language": languages[at], "length": lengths[at]} | predicted, text


def data_facts(tokens: Tokens, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `metrics.json` says of the training rows: their number, languages and labels, and the notes on all rows.

    It names no folder. `config` has the label names of a classifier, and `given` the files that the user named.
    """
    train = tokens.train
    values = [value for name, value in given.items() if name.endswith(("_file", "_files", "dataset_name"))]
    paths = [str(each) for value in values for each in (value if isinstance(value, list) else [value])]
    # A packed row of chats holds several. A long text in several windows is one.
    count = sum(map(len, train["rows"][:])) if "rows" in train.column_names else len(train)
    counts: dict[str, Any] = {"rows": count}
    counted = [name for name in ("language", "labels") if name in train.column_names]
    table = train.select_columns(counted).with_format("arrow")[:]
    if "language" in train.column_names:
        counts["languages"] = dict(sorted(counts_of(table["language"]).items()))
    if str(getattr(train.features.get("labels"), "dtype", "")).startswith("int"):  # one label a row
        numbered = counts_of(table["labels"])
        counts["labels"] = {config.id2label[number]: numbered[number] for number in sorted(numbered)}
    return counts | {**tokens.facts, "notes": [without_folders(note, paths) for note in tokens.notes]}


def add_baseline(run: Run, tokens: Tokens, split: str, dataset: Dataset, predicted: np.ndarray) -> None:
    """Train the baseline, write `baseline.json`, and show it next to the model; one process calls it.

    `dataset` has the rows of the scored split, `validation` or `test`, with one label each, and `predicted` the class
    ids by the model, int [rows].
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
        f"{what} {chosen.sum():,} of {len(chosen):,} {name} rows."
        for what, name, chosen in (("It learned", "training", learned), ("Both labelled", split, labelled))
        if not chosen.all()
    ]
    sentence = verdict(found, ("the baseline", "the model")).partition("\n")[0]
    run.show("\n".join([f"\n{first}", *less, sentence[0].upper() + sentence[1:]]))


def chosen_rows(texts: Iterable[str]) -> np.ndarray:
    """As many random rows as have two million characters together, the same each time; bool [rows]."""
    lengths = np.fromiter(map(len, texts), np.int64)
    order = np.random.default_rng(0).permutation(len(lengths))
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[order[: 1 + np.searchsorted(lengths[order].cumsum(), MAX_CHARACTERS)]] = True
    return chosen


def ngram_learner() -> tuple[Any, Any]:
    """TF-IDF of character n-grams, 2 to 5 within words, and the logistic regression on it; neither has learned yet."""
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import
    from sklearn.linear_model import LogisticRegression

    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=2, dtype=np.float32)
    return ngrams, LogisticRegression(max_iter=1_000, tol=1e-3)


def predicted_by_ngrams(texts: Iterable[str], labels: np.ndarray, others: Iterable[str]) -> np.ndarray:
    """What a logistic regression on TF-IDF of character n-grams, 2 to 5 within words, predicts.

    It learns from texts and labels, int [texts], and gives class ids, int [others]. Of a pair it sees the n-grams of
    each text, and how similar the texts are.
    """
    ngrams, regression = ngram_learner()
    learned, labelled = separated(list(texts)), separated(list(others))
    features = _of_pairs(ngrams.fit_transform(chain.from_iterable(learned)), len(learned))
    model = regression.fit(features, labels)
    return cast(np.ndarray, model.predict(_of_pairs(ngrams.transform(chain.from_iterable(labelled)), len(labelled))))


def _of_pairs(ngrams: Any, columns: int) -> Any:
    """The n-grams of single texts; or a row for each pair, of those of all first texts and then of all second ones."""
    from scipy.sparse import hstack

    if columns == 1:
        return ngrams
    first, second = np.split(np.arange(ngrams.shape[0]), 2)
    similarity = np.asarray(ngrams[first].multiply(ngrams[second]).sum(1)).reshape(-1, 1)
    return hstack([ngrams[first], ngrams[second], similarity]).tocsr()


def _labels(dataset: Dataset) -> np.ndarray:
    return cast(np.ndarray, dataset.data["labels"].to_numpy())
