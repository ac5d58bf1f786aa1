"""Read what the runs of a setting predicted, row by row, over its folds and seeds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from indictune.data.health.likely_wrong import OUT_OF_FOLD
from indictune.evaluation.comparison import Difference, difference_of, macro_f1_of
from indictune.files import PREDICTIONS, LineFile, json_line
from indictune.sweep.definition import SweepPlan
from indictune.sweep.folds import TEST_ROWS, fold_folder

COMPARED = "macro_f1"  # whose difference is tested
Rows = list[dict[str, Any]]  # of `predictions.jsonl`


def _predictions(folder: Path, block: str) -> Iterator[dict[str, Any]]:
    with (folder / PREDICTIONS).open(encoding="utf-8") as file:
        yield from (row for row in map(json.loads, file) if row["split"] == block)


def _by_seed(plan: SweepPlan, number: int) -> list[Rows]:
    """The rows that a trial is scored on, by each seed, folds one after the other; none if they cannot be compared."""
    found: dict[int, Rows] = defaultdict(list)
    try:
        for repeat in plan.repeats:
            found[repeat.seed] += _predictions(plan.folder_of(number) / repeat.name, plan.block)
        is_single = all(isinstance(row["label"], str) for rows in found.values() for row in rows)
        same_rows = len({tuple((row["id"], row["label"]) for row in rows) for rows in found.values()}) == 1
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return list(found.values()) if is_single and same_rows and plan.metric == COMPARED else []


def _class_ids(*trials: list[Rows]) -> tuple[np.ndarray, list[np.ndarray], int]:
    """The labels of the rows, int [rows], what each trial predicts, int [seeds, rows], and the number of classes."""
    each = [row for seeds in trials for rows in seeds for row in rows]
    number = {name: at for at, name in enumerate(sorted({row[key] for row in each for key in ("label", "predicted")}))}
    predicted = [np.array([[number[row["predicted"]] for row in rows] for rows in seeds]) for seeds in trials]
    return np.array([number[row["label"]] for row in trials[0][0]]), predicted, len(number)


def interval_of(plan: SweepPlan, number: int) -> list[float] | None:
    """The 95% interval of a trial's macro-F1 by resampled rows; None for another metric, or without predictions."""
    rows = _by_seed(plan, number)
    if not rows or not rows[0]:
        return None
    labels, (predicted,), count = _class_ids(rows)
    found = macro_f1_of(labels, predicted, count)
    return [found.low, found.high]


def difference(plan: SweepPlan, first: int, second: int) -> Difference | str:
    """The difference in macro-F1 of two trials, the second less the first; a reason if it cannot be tested."""
    if plan.metric != COMPARED:
        return f"only {COMPARED} is tested, and the metric is {plan.metric}"
    both = [_by_seed(plan, number) for number in (first, second)]
    if not all(rows and rows[0] for rows in both):
        return "their predictions of one label a row, on the same rows for each seed, are not both in this folder"
    if len({tuple((row["id"], row["label"]) for row in rows[0]) for rows in both}) > 1:
        return "they scored different rows"
    labels, (ours, theirs), count = _class_ids(*both)
    return difference_of(labels, ours, theirs, count)


def write_out_of_fold(plan: SweepPlan, number: int) -> None:
    """Write what a trial predicts of each training row, by runs that did not learn it, if its runs are here.

    A row has the place, text and label of the original row, and the mean probabilities over seeds.
    """
    found: dict[int, dict[str, Any]] = {}
    seeds = len({repeat.seed for repeat in plan.repeats})
    if not all((plan.folder_of(number) / each.name / PREDICTIONS).exists() for each in plan.repeats):
        return
    for repeat in plan.repeats:
        assert repeat.fold is not None
        lines = (fold_folder(plan.folder, repeat.fold) / TEST_ROWS).read_text(encoding="utf-8").split("\n")
        for row in _predictions(plan.folder_of(number) / repeat.name, plan.block):
            origin = json.loads(lines[int(row["row"].rpartition(":")[2]) - 1])
            text = " ".join(origin[name] for name in ("text", "text_pair") if name in origin)
            about = {"row": origin["row"], "text": text} | {name: row[name] for name in ("id", "language", "label")}
            about |= {"fold": repeat.fold, "trial": number, "scores": defaultdict(float)}
            scores = found.setdefault(origin["number"], about)["scores"]
            for label, score in row["scores"].items():
                scores[label] += score / seeds
    with LineFile(plan.folder / OUT_OF_FOLD) as file:
        for _, about in sorted(found.items()):
            file.append(json_line({**about, "predicted": max(about["scores"], key=about["scores"].__getitem__)}))
