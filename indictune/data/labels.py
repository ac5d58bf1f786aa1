"""Check that the labels of a run are classes, and order them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.compute as pc

from indictune.config.arguments import DataArguments
from indictune.data.collation import IGNORED_LABEL
from indictune.data.columns import shortened
from indictune.data.rows import MAX_LISTED_ROWS, StoredRows
from indictune.data.targets import MULTI_LABEL, REGRESSION, names
from indictune.errors import Problem, Problems, UserError, problem

_MAX_LABELS = 1000
_MAX_NUMBERS = 10  # of which some are no whole numbers
_MAX_WHOLE_NUMBERS = 50
_MAX_LISTED = 5
_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


def check_labels(train: StoredRows, held_out: Sequence[StoredRows], args: DataArguments) -> None:
    """Check the labels of all splits: classes, numbers or lists of labels, as `args.problem_type` says.

    Args:
        train: training rows.
        held_out: validation and test rows.
        args: how the rows were read.

    Raises:
        UserError: the labels are no numbers (of a regression); they are scores or free text, there is only one, or
            held-out rows have others (of a classification).
    """
    if args.problem_type == REGRESSION:
        Problems(each for rows in (train, *held_out) for each in not_numbers(rows)).raise_any()
        return
    counts = label_counts(train, args.problem_type)
    column: dict[str, Any] = {"column": args.label_column, "count": len(counts), "rows": len(train)}
    if args.problem_type is None and _look_continuous(counts):
        examples = ", ".join(ordered_labels(counts)[:3])
        found = problem("labels-look-continuous", train.origin, train.source, **column, examples=examples)
        raise UserError(problems=[found])
    if _look_like_text(counts, len(train)):
        examples = ", ".join(f'"{shortened(label)}"' for label in list(counts)[:3])
        found = problem("labels-look-like-text", train.origin, train.source, **column, examples=examples)
        raise UserError(problems=[found])
    problems = Problems()
    if len(counts) < 2:
        problems.append(problem("one-label", train.origin, train.source, **column, label=next(iter(counts), "")))
    for rows in held_out:
        problems.extend(unknown_labels(rows, counts, args.problem_type))
    problems.raise_any()


def not_numbers(rows: StoredRows) -> list[Problem]:
    """A problem for each of the first few labels that a regression cannot learn."""
    found = (label for label in label_counts(rows) if not _is_score(label))
    return [
        problem("label-not-number", rows.origin, rows.location(_first_row(rows, label)), label=shortened(label))
        for label in islice(found, _MAX_LISTED)
    ]


def unknown_labels(rows: StoredRows, known: Collection[str], problem_type: str | None = None) -> list[Problem]:
    """A problem for each of the first few labels that are not `known`, and one for the others."""
    if problem_type == REGRESSION:
        return not_numbers(rows)
    unknown = {label: count for label, count in label_counts(rows, problem_type).items() if label not in known}
    labels = ", ".join(map(shortened, sorted(known)[:MAX_LISTED_ROWS]))
    problems = []
    for label, count in list(unknown.items())[:_MAX_LISTED]:
        written = (each for each in label_counts(rows) if label in names([each], problem_type))
        first = rows.location(_first_row(rows, next(written)))
        details: dict[str, Any] = {"label": shortened(label), "count": count, "first": first, "known": labels}
        problems.append(problem("label-unknown", rows.origin, rows.source, **details))
    if len(unknown) > _MAX_LISTED:
        problems.append(problem("more-unknown-labels", rows.origin, rows.source, count=len(unknown) - _MAX_LISTED))
    return problems


def label_counts(rows: StoredRows, problem_type: str | None = None) -> dict[str, int]:
    """Label -> number of rows. A row of several labels counts for each."""
    counts = {item["values"]: item["counts"] for item in pc.value_counts(rows.table["label"]).to_pylist()}
    if problem_type != MULTI_LABEL:
        return counts
    of_parts: Counter[str] = Counter()
    for label, count in counts.items():
        of_parts.update(dict.fromkeys(names([label], problem_type), count))
    return dict(of_parts)


def _first_row(rows: StoredRows, label: str) -> int:
    return int(pc.index(rows.table["label"], label).as_py())


def _is_score(label: str) -> bool:
    """Whether a label is a number that float32 holds. -100 marks rows that do not count."""
    try:
        score = float(label)
    except ValueError:
        return False
    return abs(score) <= _LARGEST and score != IGNORED_LABEL


def ordered_labels(labels: Collection[str]) -> list[str]:
    """Labels in numerical order if all are numbers, else in alphabetical order."""
    names = sorted(labels)
    return sorted(names, key=float) if _are_numbers(names) else names


def _are_numbers(labels: Collection[str]) -> bool:
    return all(map(_NUMBER.fullmatch, labels))


def _look_continuous(labels: Collection[str]) -> bool:
    """Whether the labels look like scores: many numbers, such as 0, 0.1, ... 5 or 0, 1, ... 100."""
    if len(labels) <= _MAX_NUMBERS or not _are_numbers(labels):
        return False
    return len(labels) > _MAX_WHOLE_NUMBERS or not all(float(label).is_integer() for label in labels)


def _look_like_text(counts: Mapping[str, int], rows: int) -> bool:
    """Whether there are too many labels, or nearly one for each row: over 20, or at least 5 of several words."""
    if len(counts) > _MAX_LABELS:
        return True
    if 2 * len(counts) <= rows:
        return False
    wordy = sum(len(label.split()) >= 3 for label in counts)
    return len(counts) > 20 or (len(counts) >= 5 and 2 * wordy > len(counts))
