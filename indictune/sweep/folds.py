"""Divide the training rows of a classifier into folds, each a training and a test file, and join their predictions."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from indictune.config.command_line import DATA_SOURCE_FIELDS
from indictune.config.recipe import Recipe
from indictune.data.cache import StoredRows
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.health.findings import near_groups
from indictune.data.health.likely_wrong import OUT_OF_FOLD
from indictune.data.labels import MULTI_LABEL, REGRESSION
from indictune.errors import Problems, UserError, problem
from indictune.files import PREDICTIONS, json_line, write_whole
from indictune.preflight.derive import plan_of_rows
from indictune.sweep.definition import SweepPlan, Words
from indictune.tasks.classification import ClassifiedRows
from indictune.tasks.protocol import Task

_FLAG = "--folds"
_COLUMNS = {f"{name}_column": [name] for name in ("text", "label", "language")}
# How rows were read and named: the files of the folds have them as they were read.
OF_ROWS = {*DATA_SOURCE_FIELDS, *_COLUMNS, "text_pair_column", "label_map", "delimiter", "column_names", "quoting"}


def rows_of_folds(recipe: Recipe, task: Task[Any, Any, Any], folds: int) -> Mapping[str, StoredRows]:
    """The training rows, and validation rows if some are named, as a run reads them that holds out none.

    A `UserError` has all problems of the flags and the rows, and refuses what has no folds. Languages are not evened
    out yet: each run does that with its own training rows.
    """
    values = {name: value for name, value in recipe.values.items() if name != "test_file"}
    whole = {"validation_split": 0.0, "language_sampling_alpha": 1.0}
    plan, problems = plan_of_rows(replace(recipe, values={**values, **whole}), task)
    if plan.data.train_files:
        raise UserError("folds-of-mixed-files", _FLAG, folds)
    if task.name != "classification" or plan.data.problem_type in (MULTI_LABEL, REGRESSION):
        raise UserError("folds-of-other-task", _FLAG, folds)
    rows = task.read(plan, task.open(plan, problems), problems)
    problems.raise_any()
    assert isinstance(rows, ClassifiedRows)
    return rows.splits.rows


def divide(rows: StoredRows, folds: int, seed: int) -> np.ndarray:
    """The fold that each row is held out by, int [rows]: stratified by label, and groups of alike texts together.

    A `UserError` names labels that a fold would lack.
    """
    from sklearn.model_selection import StratifiedGroupKFold  # slow to import

    labels, groups = np.array(rows.table["label"].to_pylist()), near_groups(rows.texts)
    texts_of = {name: len(np.unique(groups[labels == name])) for name in np.unique(labels).tolist()}
    lacking = [name for name, texts in texts_of.items() if texts < folds]
    fold_of_row = np.zeros(len(rows), np.int64)
    if not lacking:
        splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
        for fold, (_, test) in enumerate(splitter.split(labels, labels, groups)):
            fold_of_row[test] = fold
        lacking = [name for name in texts_of if len(np.unique(fold_of_row[labels == name])) < folds]
    found = [problem("fold-lacks-label", _FLAG, folds, label=each, texts=texts_of[each]) for each in lacking]
    Problems(found).raise_any()
    return fold_of_row


def write_folds(folder: Path, rows: Mapping[str, StoredRows], folds: int, seed: int) -> list[Words]:
    """Write the rows of each fold, and return the flags by which a run reads them.

    Rows have `text` and `text_pair`, `label`, `language`, and of the original row `number` and place (`row`).
    """
    fold_of_row, lines, found = divide(rows["train"], folds, seed), _lines(rows["train"]), list[Words]()
    shared = {**_COLUMNS, **({"text_pair_column": ["text_pair"]} if '"text_pair": ' in lines[0] else {})}
    if "validation" in rows:
        shared["validation_file"] = [str(folder / "validation.jsonl")]
        write_whole(folder / "validation.jsonl", "".join(_lines(rows["validation"])))
    for fold in range(folds):
        train, test = folder / f"{fold}.train.jsonl", folder / f"{fold}.test.jsonl"
        write_whole(train, "".join(compress(lines, fold_of_row != fold)))
        write_whole(test, "".join(compress(lines, fold_of_row == fold)))
        found.append({**shared, "train_file": [str(train)], "test_file": [str(test)]})
    return found


def _lines(rows: StoredRows) -> list[str]:
    columns = [rows.table[name].to_pylist() for name in ("text", "label", "language")]
    found = []
    for number, (text, label, language) in enumerate(zip(*columns, strict=True)):
        texts = dict(zip(("text", "text_pair"), text.split(BETWEEN_TEXTS), strict=False))
        about = {"label": label, "language": language, "number": number, "row": rows.location(number)}
        found.append(json_line({**texts, **about}))
    return found


def write_out_of_fold(plan: SweepPlan, trial: int) -> None:
    """Write what a trial predicts of each training row, by runs that did not learn it; nothing if they are not here.

    A row has the place, text and label of the original row, and the mean probabilities over seeds.
    """
    found: dict[int, dict[str, Any]] = {}
    seeds = len({*(flags["seed"][0] for flags in plan.repeats.values())})
    for name, flags in plan.repeats.items():
        file = plan.folder_of(trial, name) / PREDICTIONS
        if not file.exists():
            (plan.folder / OUT_OF_FOLD).unlink(missing_ok=True)  # of the best trial before
            return
        rows = [json.loads(line) for line in Path(flags["test_file"][0]).read_text(encoding="utf-8").split("\n")[:-1]]
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]:
            predicted = json.loads(line)
            if predicted["split"] == plan.block:
                row = rows[int(predicted["row"].rpartition(":")[2]) - 1]
                scores = found.setdefault(row["number"], {**row, "scores": defaultdict(float)})["scores"]
                for label, score in predicted["scores"].items():
                    scores[label] += score / seeds
    write_whole(plan.folder / OUT_OF_FOLD, "".join(json_line(row) for _, row in sorted(found.items())))
