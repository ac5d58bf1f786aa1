"""Finish a run: its trained model is saved, scored row by row and compared with a baseline."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from transformers.trainer_utils import TrainOutput

from indictune.checkpoint import save
from indictune.checkpoint.store import UNFINISHED_MODEL
from indictune.config.recipe import configuration_of
from indictune.console_text import without_tokens
from indictune.data.cache import write_through
from indictune.data.languages import scripts_of
from indictune.distributed import collectives, devices, sharding
from indictune.evaluation.breakdown import EVALUATION, MISTAKES, SPLITS, Breakdown, Mistakes, as_json
from indictune.evaluation.comparison import compare, verdict
from indictune.evaluation.score_names import in_sentences
from indictune.evaluation.uncertainty import RESAMPLES
from indictune.files import BASELINE, PREDICTIONS, TEST_FILE, LineFile, json_line, write_json
from indictune.hub import publish
from indictune.hub.card import write_card
from indictune.hub.public_text import without_folders
from indictune.models.atomic_folder import match_config_mode
from indictune.report.report_page import write_report
from indictune.run import OWN_PROGRESS, Run, Stopped
from indictune.tasks.protocol import Objective, Origins, TestTokens, Tokens
from indictune.training.evaluation import prepared_model, write_samples
from indictune.training.exact_trainer import ExactTrainer
from indictune.training.verify import verify_saved
from indictune.versions import versions_of_steps

logger = logging.getLogger(__name__)

_BLOCKS = {split: block for block, split in SPLITS.items()}
_ROWS_AT_ONCE = 10_000
MAX_CHARACTERS = 2_000_000  # some 10 seconds on one CPU core
MIN_ROWS = 100  # fewer training rows say nothing of a model


def save_model(trainer: ExactTrainer, run: Run) -> list[str]:
    """Save the trained model in `--output_dir`, whole or not at all. All ranks must call it.

    It is written to a folder there, given to nodes with separate disks, read again, and then moved into place. Ranks
    that write files get the names of the saved ones.

    Raises:
        SavedModelError: it is not the trained one.
        SaveError: the disk does not take it.
        NonFiniteLossError: a weight is NaN or infinite.
        Stopped: a rank was asked to stop. A resumed run need not train again.
    """
    trainer.check_weights()
    trainer.look_for_stop("the trained model was to be saved; a resumed run saves it", at_once=True)
    unfinished = run.output_dir / UNFINISHED_MODEL
    needed_bytes = partial(sharding.whole_bytes, sharding.unwrapped(trainer))
    with save.reporting(run.output_dir, "the model", unfinished, needed_bytes):
        trainer.save_model(str(unfinished), _internal_call=True)  # pushed once, by `finish`, when all is written
        if run.rank == 0:
            trainer.objective.finish_tokenizer(unfinished, configuration_of(run.output_dir)["max_length"])
        collectives.give_files(unfinished, run.rank == 0, trainer.args, trainer.disks_group)
    try:
        verify_saved(trainer, unfinished)
    except Stopped:
        if trainer.args.should_save:
            shutil.rmtree(unfinished)
        raise
    if not trainer.args.should_save:
        return []
    match_config_mode(unfinished)
    files = sorted(path.name for path in unfinished.iterdir())
    put_in_place(unfinished, run.output_dir)
    return files


def put_in_place(folder: Path, target: Path) -> None:
    """Sync a folder's files to the disk and move them to another, weights last. Remove the folder."""
    for path in sorted(folder.iterdir(), key=lambda path: ".safetensors" in path.name):
        there = target / path.name
        if path.is_dir():
            shutil.rmtree(there, ignore_errors=True)
        else:
            write_through(path)
        path.replace(there)
    write_through(target)
    folder.rmdir()


def finish(trainer: ExactTrainer, run: Run, result: TrainOutput, tokens: Tokens, saved_files: list[str]) -> None:
    """Evaluate the saved model, write `metrics.json` last, and push if asked to. All ranks must call it.

    The test rows are evaluated only here. `result` comes from `train`, and `saved_files` from `save_model`.
    """
    state = trainer.state
    if state.global_step < state.max_steps:
        logger.info("Stopped early, after step %d of %d", state.global_step, state.max_steps)
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        best = Path(state.best_model_checkpoint).name
        logger.info("The model is that of %s, the best by %s", best, trainer.args.metric_for_best_model)
    training = trainer.throughput.totals(result.metrics["train_runtime"])
    if seconds := trainer.checkpoints.snapshot_seconds:
        share = sum(seconds) / result.metrics["train_runtime"]
        training["snapshots"] = {"median_s": statistics.median(seconds), "share_of_runtime": share}
    metrics = run_metrics(trainer) | {
        "global_batch_size": trainer.args.global_batch_size,
        "train": training | {"peak_memory_bytes": peak_memory_bytes(trainer)},
        "data": data_facts(tokens, sharding.unwrapped(trainer).config, run.recipe.values),
        "versions": versions_of_steps(),
    }
    findings = Findings(run)
    with findings.writing():
        for split, dataset in (("validation", trainer.eval_dataset), ("test", tokens.test)):
            if dataset is not None:
                metrics[_BLOCKS[split]] = findings.evaluate(trainer, dataset, split, tokens.origins.get(split))
    if trainer.args.should_save and (fitted := trainer.objective.fitted()):
        config = run.output_dir / "config.json"
        write_json(config, json.loads(config.read_text(encoding="utf-8")) | fitted)
    assert run.plan is not None
    has_labels = any(each.kind == "single_label" for each in findings.breakdowns.values())  # one each, on rank 0
    if run.plan.configuration.get("baseline") and has_labels:  # of a task that has the flag
        split = "validation" if tokens.test is None else "test"
        scored = trainer.eval_dataset if tokens.test is None else tokens.test
        add_baseline(run, tokens, split, scored, findings.results[0])
    if trainer.args.push_to_hub:
        publish.begin_push(trainer, saved_files)
    write_metrics(trainer, run, metrics)
    if trainer.args.should_save:
        write_card(run.output_dir, trainer.hub_model_id if trainer.args.push_to_hub else None)
        if trainer.args.report:
            report_run(run, texts=not trainer.args.push_to_hub)
    if trainer.args.push_to_hub and run.rank == 0:
        publish.publish_run(run.output_dir, trainer.args)


def report_run(run: Run, texts: bool) -> None:
    """Write `report.html`. If that fails it is a warning: the model is there."""
    try:
        path = write_report([run.output_dir], texts=texts)
    except Exception as error:
        reason = without_tokens(f"{type(error).__name__}: {error}")
        run.warn([f"No report is written ({reason}). Try again: indictune report {run.output_dir}"])
    else:
        run.show(f"Open {path} in a browser: curves, scores, mistakes.")


def write_metrics(trainer: ExactTrainer, run: Run, metrics: dict[str, Any]) -> None:
    """Write `metrics.json`, which marks a finished run, on every disk."""
    if trainer.args.should_save:
        write_json(run.output_dir / "metrics.json", metrics)
        write_through(run.output_dir / "metrics.json")
        write_through(run.output_dir)
    if run.rank == 0:
        run.show(f"\nWritten to {run.output_dir}")


def evaluate_file(trainer: ExactTrainer, run: Run, test: TestTokens, test_file: str) -> None:
    """Evaluate a file's rows and write `metrics.json`, which names the file. All ranks must call it."""
    findings = Findings(run)
    if test.samples is not None:
        prepared_model(trainer)
        write_samples(trainer, run, test.samples)
    with findings.writing():
        tested = findings.evaluate(trainer, test.rows, "test", test.origins)
    path = os.path.abspath(test_file)
    if trainer.args.should_save:
        write_json(run.output_dir / TEST_FILE, {"test_file": path})
    write_metrics(trainer, run, run_metrics(trainer) | {"test_file": os.path.basename(path), "test": tested})


def run_metrics(trainer: ExactTrainer) -> dict[str, Any]:
    """The first block of `metrics.json`: how the run was distributed. All ranks must call it."""
    where = {"devices": devices.device_counts(trainer.args), "dtype": devices.dtype_of(trainer.args)}
    return {"strategy": trainer.launch.strategy, "world_size": trainer.args.world_size, **where}


def peak_memory_bytes(trainer: ExactTrainer) -> int:
    """The most memory that any rank has used: GPU memory, or the process's memory without a GPU."""
    device = trainer.args.device
    if device.type == "cpu":
        mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    else:
        mine = torch.accelerator.max_memory_allocated(device)
    return int(trainer.accelerator.gather(torch.tensor([mine], device=device)).max())


class Findings:
    """The files of a run's or a command's evaluations, which rank 0 writes.

    Attributes:
        breakdowns: of the evaluations so far, by split.
        results: of the latest evaluation.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.breakdowns: dict[str, Breakdown] = {}
        self.results: Sequence[np.ndarray] = ()
        self._lines: LineFile | None = None
        self._mistakes = Mistakes()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect the evaluations of the block, and put the files into place at its end."""
        if self.run.rank != 0:
            yield
            return
        with LineFile(self.run.output_dir / PREDICTIONS) as self._lines:
            yield
        write_json(self.run.output_dir / EVALUATION, as_json(self.breakdowns))
        write_json(self.run.output_dir / MISTAKES, self._mistakes.by_split())

    def evaluate(self, trainer: ExactTrainer, dataset: Dataset, split: str, origins: Origins | None) -> dict[str, Any]:
        """Evaluate the rows of `validation` or `test`, show the table, and return its block of `metrics.json`.

        All ranks must call it. Rank 0 keeps predictions and scores.
        """
        objective, run, name = trainer.objective, self.run, _BLOCKS[split]
        objective.keeps_scores = True
        trainer.evaluate(dataset, metric_key_prefix=name)
        block, results, trainer.measured = trainer.detailed_metrics[name], trainer.measured, None
        objective.keeps_scores = False
        if not math.isfinite(block["loss"]):
            note = f"The loss on the {split} rows is {block['loss']}: half precision may overflow on some of them."
            run.warn([note])
        run.show(f"\n{split} rows\n{objective.tables(block)}")
        assert results is not None
        written = trainer.written if trainer.samples is not None and trainer.samples.split == split else None
        if written is not None:
            block |= {score: estimate.value for score, estimate in written.overall.scores.items()}
        if self._lines is not None:
            self.results = results
            scripts = None if origins is None else scripts_of(origins.texts, dataset["language"][:])
            found = replace(objective.breakdown(dataset, results, scripts, RESAMPLES), written=written)
            for row, text in _rows(objective, name, dataset, results, origins, scripts):
                self._lines.append(json_line(row))
                self._mistakes.add(row, text)
            self.breakdowns[name] = found
            run.show(f"\n{in_sentences(found)}")
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
    if "language" in train.column_names:
        counts["languages"] = dict(sorted(Counter(train["language"][:]).items()))
    if str(getattr(train.features.get("labels"), "dtype", "")).startswith("int"):  # one label a row
        numbered = Counter(train["labels"][:])
        counts["labels"] = {config.id2label[number]: numbered[number] for number in sorted(numbered)}
    return counts | {"notes": [without_folders(note, paths) for note in tokens.notes]}


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


def predicted_by_ngrams(texts: Iterable[str], labels: np.ndarray, others: Iterable[str]) -> np.ndarray:
    """What a logistic regression on TF-IDF of character n-grams, 2 to 5 within words, predicts.

    It learns from texts and labels, int [texts], and gives class ids, int [others].
    """
    from sklearn.feature_extraction.text import TfidfVectorizer  # slow to import
    from sklearn.linear_model import LogisticRegression

    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True, min_df=2, dtype=np.float32)
    features = ngrams.fit_transform(texts)
    model = LogisticRegression(max_iter=1_000, tol=1e-3).fit(features, labels)
    return cast(np.ndarray, model.predict(ngrams.transform(others)))


def _labels(dataset: Dataset) -> np.ndarray:
    return cast(np.ndarray, dataset.data["labels"].to_numpy())
