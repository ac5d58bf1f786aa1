"""Divide the training rows of a classifier into folds, each a training and a test file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from indictune.config.plan import AnyPlan
from indictune.config.recipe import DATASET_FIELDS, Recipe
from indictune.data.cache import StoredRows, are_pairs, content_digest
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.health.findings import near_groups
from indictune.data.labels import MULTI_LABEL, REGRESSION
from indictune.data.read.open_files import files_named
from indictune.data.read.row_sources import entries_of
from indictune.errors import Problems, UserError, problem
from indictune.files import json_line
from indictune.preflight.derive import plan_of_rows
from indictune.sweep.definition import Words
from indictune.tasks.classification import ClassifiedRows
from indictune.tasks.protocol import Task

TEST_ROWS, VALIDATION_ROWS = "test.jsonl", "validation.jsonl"
_FLAG = "--folds"
# How rows were read and named; the files of the folds have them as they were read.
_OF_ROWS = (
    *(*DATASET_FIELDS, "train_file", "train_files", "validation_file", "test_file", "label_map"),
    *("text_column", "text_pair_column", "label_column", "language_column", "delimiter", "column_names", "quoting"),
)


def fold_folder(folder: Path, fold: int) -> Path:
    """The folder of a fold's rows in that of its sweep."""
    return folder / "folds" / str(fold)


def read_rows_of_folds(recipe: Recipe, task: Task[Any, Any, Any], folds: int) -> ClassifiedRows:
    """Read the training rows, and validation rows if some are named, as a run would that holds out none.

    A `UserError` has all problems of the flags and the rows, and refuses what has no folds.
    """
    values = {name: value for name, value in recipe.values.items() if name != "test_file"}
    recipe = replace(recipe, values={**values, "validation_split": 0.0}, problems=Problems(recipe.problems))
    if task.name != "classification":
        raise UserError("folds-of-other-task", _FLAG, folds, kind=task.name)
    plan, problems = plan_of_rows(recipe, task)
    mode = plan.data.problem_type
    if mode in (MULTI_LABEL, REGRESSION):
        raise UserError("folds-of-other-task", _FLAG, folds, kind=f"--problem_type {mode}")
    problems.extend(_weights(plan, folds))
    rows = task.read(plan, task.open(plan, problems), problems)
    problems.raise_any()
    assert isinstance(rows, ClassifiedRows)
    return rows


def _weights(plan: AnyPlan, folds: int) -> Problems:
    """Rows that come several times in an epoch would be in several folds."""
    problems = Problems()
    for entry in problems.attempt(entries_of, plan.data.train_files) or ():  # type: ignore[attr-defined]
        if entry.weight != 1:
            problems.append(problem("folds-with-weights", _FLAG, folds, path=entry.path, weight=entry.weight))
    return problems


def divide(rows: StoredRows, folds: int, seed: int) -> np.ndarray:
    """The fold that each row is held out by, int [rows]: stratified by label, and groups of alike texts together.

    A `UserError` names a label that a fold would lack, in its training or its test rows.
    """
    from sklearn.model_selection import StratifiedGroupKFold  # slow to import

    labels = np.array(rows.table["label"].to_pylist(), dtype=object)
    groups, problems = near_groups(rows.texts), Problems()
    names, codes = np.unique(labels, return_inverse=True)
    for code, name in enumerate(names):
        if (has := len(np.unique(groups[codes == code]))) < folds:
            problems.append(problem("fold-lacks-label", _FLAG, folds, label=name, texts=has))
    problems.raise_any()
    fold_of_row = np.zeros(len(rows), np.int64)
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    for fold, (train, test) in enumerate(splitter.split(codes, codes, groups)):
        fold_of_row[test] = fold
        for part in (train, test):
            for code in sorted({*range(len(names))} - {*codes[part].tolist()}):
                texts = len(np.unique(groups[codes == code]))
                problems.append(problem("fold-lacks-label", _FLAG, folds, label=names[code], texts=texts))
    Problems(dict.fromkeys(problems)).raise_any()
    return fold_of_row


def files_of_folds(
    folder: Path, rows: Mapping[str, StoredRows], folds: int, seed: int
) -> tuple[list[dict[str, list[str]]], dict[Path, str], str]:
    """The flags by which a run reads each fold, the files that they name with their content, and a digest of all.

    Rows have `text` and `text_pair`, `label`, `language`, and of the original row `number` and place (`row`).
    """
    train, found = rows["train"], []
    fold_of_row, lines = divide(train, folds, seed), _lines(train)
    of_rows = {"text_column": ["text"], "label_column": ["label"], "language_column": ["language"]}
    of_rows |= {"text_pair_column": ["text_pair"]} if are_pairs(train.texts) else {}
    files = dict[Path, str]()
    if "validation" in rows:
        path = fold_folder(folder, 0).parent / VALIDATION_ROWS
        files[path] = "".join(_lines(rows["validation"]))
        of_rows["validation_file"] = [str(path)]
    for fold in range(folds):
        named = {}
        for name, mask in {"train": fold_of_row != fold, "test": fold_of_row == fold}.items():
            path = fold_folder(folder, fold) / f"{name}.jsonl"
            files[path] = "".join(compress(lines, mask))
            named[f"{name}_file"] = [str(path)]
        found.append({**of_rows, **named})
    digest = hashlib.sha256("".join(files.values()).encode("utf-8", "backslashreplace")).hexdigest()
    return found, files, digest


def without_rows(flags: Words) -> Words:
    """The flags of a run without those that say which rows it reads, and how."""
    return {name: words for name, words in flags.items() if name not in _OF_ROWS}


def _lines(rows: StoredRows) -> list[str]:
    columns = [rows.table[name].to_pylist() for name in ("text", "label", "language")]
    found = []
    for number, (text, label, language) in enumerate(zip(*columns, strict=True)):
        texts = dict(zip(("text", "text_pair"), text.split(BETWEEN_TEXTS), strict=False))
        about = {"label": label, "language": language, "number": number, "row": rows.location(number)}
        found.append(json_line({**texts, **about}))
    return found


def digest_of_files(plan: AnyPlan) -> str:
    """A digest of the files of rows that a run names on this machine: a changed file makes another sweep."""
    data: Any = plan.data
    named = [file for entry in entries_of(data.train_files) for file in entry.files]
    for split, files in (("train", data.train_file), ("validation", data.validation_file), ("test", data.test_file)):
        named += [] if files is None else [*files_named(files, split)[1]]
    return hashlib.sha256("".join(map(content_digest, named)).encode()).hexdigest()
