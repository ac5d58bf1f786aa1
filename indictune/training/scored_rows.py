"""What a run writes of the rows that it scored: predictions, scores, mistakes and a baseline."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, fields, replace
from hashlib import blake2b
from itertools import chain, compress
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Dataset

from indictune.config.plan import AnyPlan
from indictune.config.shared_arguments import ENOUGH_STEPS, TextArguments
from indictune.console_text import shown_language
from indictune.data.cache import counts_of, separated
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.languages import scripts_of
from indictune.errors import UserError
from indictune.evaluation import breakdown
from indictune.evaluation.comparison import Comparison, compare_classifiers, verdict
from indictune.evaluation.uncertainty import RESAMPLES
from indictune.files import (
    BASELINE,
    METRICS,
    PREDICTIONS,
    RECIPE,
    LineFile,
    json_line,
    write_json,
    write_yaml,
)
from indictune.hub.public_text import without_folders
from indictune.models.atomic_folder import match_config_mode
from indictune.models.builtin import PREFIX
from indictune.models.fetched import COMMAND
from indictune.models.load import is_baseline
from indictune.models.ngrams import ngram_learner, save_ngrams
from indictune.run import OWN_PROGRESS, Run
from indictune.tasks.protocol import Objective, Origins, Tokens
from indictune.training.exact_trainer import ExactTrainer

BLOCK_OF_SPLIT = {split: block for block, split in breakdown.SPLITS.items()}
_ROWS_AT_ONCE = 10_000
FOLDER = "baseline"
MAX_CHARACTERS = 2_000_000  # some 10 seconds on one CPU core
MIN_ROWS = 100  # fewer training rows say nothing of a model
_FEW_ROWS = 100  # of a label
_MAX_LENGTH = 1_000_000  # n-grams of a text: all of them
_LEAST = 1e-12  # of a probability


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
    def writing(self, folder: Path | None = None) -> Iterator[None]:
        """Collect the evaluations of the block, and put the files into place at its end; by default in the run's."""
        if self.run.rank != 0:
            yield
            return
        folder = folder or self.run.output_dir
        with LineFile(folder / PREDICTIONS) as self._lines:
            yield
        write_json(folder / breakdown.EVALUATION, breakdown.as_json(self.breakdowns))
        write_json(folder / breakdown.MISTAKES, self._mistakes.by_split())

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
            found = replace(self.keep(objective, dataset, name, results, origins), written=written)
            self.breakdowns[name] = found if own is None else own.beside(found)
            run.show(f"\n{breakdown.in_sentences(self.breakdowns[name])}")
        return block

    def keep(
        self, objective: Objective, dataset: Dataset, name: str, results: Sequence[np.ndarray], origins: Origins | None
    ) -> breakdown.Breakdown:
        """Add the rows of a block to the files, and return their scores; rank 0 calls it while `writing`."""
        assert self._lines is not None
        scripts = None if origins is None else scripts_of(origins.texts, dataset["language"][:])
        for row, text in _rows(objective, name, dataset, results, origins, scripts):
            self._lines.append(json_line(row))
            self._mistakes.add(row, *text.split(BETWEEN_TEXTS))
        self.breakdowns[name] = objective.breakdown(dataset, results, scripts, RESAMPLES)
        return self.breakdowns[name]


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


class Ngrams:
    """The baseline, which has learned texts and their labels, int [texts].

    Of a pair it sees the n-grams of each text, and how similar the texts are.
    """

    def __init__(self, texts: Iterable[str], labels: np.ndarray) -> None:
        self.vectors, self.regression = ngram_learner()
        learned = separated(list(texts))
        self.reads_pairs = len(learned) > 1
        features = self.vectors.fit_transform(chain.from_iterable(learned))
        self.regression.fit(_of_pairs(features, len(learned)), labels)

    def log_probabilities(self, texts: Sequence[str], labels: int) -> np.ndarray:
        """Of each of so many labels, float64 [texts, labels]."""
        columns = separated(list(texts))
        features = _of_pairs(self.vectors.transform(chain.from_iterable(columns)), len(columns))
        found = np.zeros((len(texts), labels))
        found[:, self.regression.classes_] = self.regression.predict_proba(features)
        return np.log(np.maximum(found, _LEAST))


def add_baseline(
    run: Run, tokens: Tokens, split: str, dataset: Dataset, predicted: np.ndarray, objective: Any, steps: int
) -> None:
    """Train the baseline, save it and its comparison, and show both next to the model; one process calls it.

    `dataset` has the rows of the scored split, `validation` or `test`, with one label each, and `predicted` the class
    ids by the model, int [rows]. `objective` is a `SingleLabel`, and `steps` are those that the run was to take.
    """
    if len(tokens.train) < MIN_ROWS:
        return
    assert run.plan is not None
    OWN_PROGRESS.passed("training the baseline")
    began = time.monotonic()
    train, origins = tokens.origins["train"], tokens.origins[split]
    learned, labelled = chosen_rows(train.texts), chosen_rows(origins.texts)
    ngrams = Ngrams(compress(train.texts, learned), _labels(tokens.train)[learned])
    kept, texts = Dataset(dataset.data.table.filter(labelled)), list(compress(origins.texts, labelled))
    scores = ngrams.log_probabilities(texts, len(objective.names))
    found = compare_classifiers(_labels(kept), scores.argmax(1), predicted[labelled], kept["language"][:])
    seconds = time.monotonic() - began
    rows = {"train_rows": int(learned.sum()), "of_train_rows": len(learned)}
    rows |= {"rows": len(kept), "of_rows": len(labelled)}
    content = {"model": "character n-grams 2 to 5, TF-IDF, logistic regression", "split": split, "seconds": seconds}
    write_json(run.output_dir / BASELINE, content | rows | asdict(found))
    is_saved = not ngrams.reads_pairs
    if is_saved:
        numbers = np.flatnonzero(labelled).tolist()
        of_kept = Origins(lambda at: origins.location(numbers[at]), texts)
        is_saved = _save(run, ngrams, objective, kept, BLOCK_OF_SPLIT[split], scores, of_kept)
    less = [
        f"{what} {rows[of]:,} of {rows[f'of_{of}']:,} {name} rows."
        for what, name, of in (("It learned", "training", "train_rows"), ("Both labelled", split, "rows"))
        if rows[of] < rows[f"of_{of}"]
    ]
    both = f"macro_f1 {found.overall.first:.4f}, the model's {found.overall.second:.4f}"
    sentence = verdict(found, ("the baseline", "the model")).partition("\n")[0]
    lines = [f"\nbaseline, {content['model']} ({seconds:.1f} s): {both}", *less, sentence[0].upper() + sentence[1:]]
    if found.overall.difference.high < 0 and is_saved:
        lines.append(f'It is saved as a model. Use it: indictune predict {run.output_dir / FOLDER} --text "..."')
    if found.overall.difference.low <= 0:
        counts = np.bincount(_labels(tokens.train), minlength=len(objective.names)).tolist()
        causes = likely_causes(run.plan, steps, dict(zip(objective.names, counts, strict=True)), found)
        lines += ["Why the model may not be ahead, the likeliest reason first:", *(f"- {cause}" for cause in causes)]
    run.show("\n".join(lines))


def likely_causes(plan: AnyPlan, steps: int, counts: Mapping[str, int], found: Comparison) -> list[str]:
    """Sentences on why a model is not ahead of its baseline, each with the flag to change; the likeliest first.

    `counts` has the training rows of each label.
    """
    causes = []
    if plan.model.model_name_or_path.startswith(PREFIX):
        causes.append(
            "The model began with random weights. --model_name_or_path ai4bharat/IndicBERTv2-MLM-only begins with "
            f"pretrained ones; without the Hub, `{COMMAND}` fetches some."
        )
    if steps < ENOUGH_STEPS:
        flag = "max_steps" if plan.training.max_steps > 0 else "min_steps"
        causes.append(f"The run has {steps} optimizer steps. --{flag} {ENOUGH_STEPS} gives it more.")
    rarest = min(counts, key=lambda name: counts[name])
    if counts[rarest] < _FEW_ROWS:
        causes.append(f"Label {rarest} has {counts[rarest]} training rows. Add rows of it to --train_file.")
    worse = [language for language, gap in found.by_language.items() if gap.difference.high < 0]
    if len(worse) == 1 < len(found.by_language):
        language = shown_language(worse[0])
        causes.append(f"It loses in {language} alone. --language_sampling_alpha 0.5 trains rare languages more often.")
    return causes or ["None of the usual ones is seen. Try a larger model by --model_name_or_path."]


def _save(
    run: Run, ngrams: Ngrams, objective: Any, dataset: Dataset, block: str, scores: np.ndarray, origins: Origins
) -> bool:
    """Write the baseline as a finished model with its own evaluation, whole or not at all; whether it did."""
    assert run.plan is not None
    folder = run.output_dir / FOLDER
    if folder.exists() and not is_baseline(folder):
        run.warn([f"The baseline is not saved as a model: {folder} holds other files."])
        return False
    unfinished = folder.with_name(f".{FOLDER}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    objective = copy(objective)
    objective.temperature = None  # that of the trained model
    save_ngrams(ngrams.vectors, ngrams.regression, objective.names, unfinished)
    reading = {each.name: run.plan.configuration[each.name] for each in fields(TextArguments)}
    write_yaml(unfinished / RECIPE, {**reading, "task": "classification", "max_length": _MAX_LENGTH})
    labels, findings = _labels(dataset), Findings(run)
    with findings.writing(unfinished):
        results = scores.argmax(1), -scores[np.arange(len(labels)), labels], scores
        found = findings.keep(objective, dataset, block, results, origins)
    write_json(unfinished / METRICS, {block: objective.metrics(found)})
    match_config_mode(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return True


def chosen_rows(texts: Iterable[str]) -> np.ndarray:
    """As many random rows as have two million characters together, the same each time; bool [rows]."""
    lengths = np.fromiter(map(len, texts), np.int64)
    order = np.random.default_rng(0).permutation(len(lengths))
    chosen = np.zeros(len(lengths), np.bool_)
    chosen[order[: 1 + np.searchsorted(lengths[order].cumsum(), MAX_CHARACTERS)]] = True
    return chosen


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
