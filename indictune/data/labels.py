"""Check that the labels of a run are classes, and order them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.collation import IGNORED_LABEL
from indictune.data.columns import shortened
from indictune.data.label_lists import look_like_lists
from indictune.data.rows import MAX_LISTED_ROWS, StoredRows
from indictune.data.targets import MULTI_LABEL, REGRESSION, names
from indictune.errors import Problem, Problems, problem

_MAX_LABELS = 1000
_MAX_SCORES = 10
_MAX_CLASS_NUMBERS = 50
_MAX_UNIQUE = 20  # labels, if there is nearly one for each row
_MAX_LISTED = 5
_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


def checked_labels(
    train: StoredRows, held_out: Sequence[StoredRows], column: str, problem_type: str | None
) -> list[str]:
    """The names of the labels in the order of their ids: by number if all are numbers, else by the alphabet.

    Raises:
        UserError: the labels are no numbers (of a regression); they are scores or free text, there is only one, or
            held-out rows have others (of a classification).
    """
    counts = label_counts(train, problem_type)
    problems = Problems()
    if problem_type == REGRESSION:
        problems.extend(each for rows in (train, *held_out) for each in not_numbers(rows))
    elif code := _doubt(counts, len(train), problem_type):
        examples = ", ".join(map(shortened, list(counts)[:3]))
        details: dict[str, Any] = {"column": column, "count": len(counts), "rows": len(train), "examples": examples}
        problems.append(problem(code, train.origin, train.source, **details))
    else:
        problems.extend(each for rows in held_out for each in unknown_labels(rows, counts, problem_type))
    problems.raise_any()
    found = sorted(names(counts, problem_type))
    return sorted(found, key=float) if _are_numbers(found) else found


def _doubt(counts: Mapping[str, int], rows: int, problem_type: str | None) -> str | None:
    """Code of the problem with labels that look like no classes, if there is one.

    Scores are more than ten numbers in steps, such as 0, 0.1, ... 5 or 0, 5, ... 100, or more than fifty whole ones.
    Free text has too many values, or nearly one for each row.
    """
    if len(counts) < 2:
        return "one-label"
    if problem_type is None and look_like_lists(counts):
        return "labels-look-like-lists"
    if problem_type is None and _are_numbers(counts):
        numbers = [float(label) for label in counts]
        are_whole = all(number.is_integer() for number in numbers)
        are_class_numbers = are_whole and math.gcd(*(int(number - numbers[0]) for number in numbers)) == 1
        if len(counts) > (_MAX_CLASS_NUMBERS if are_class_numbers else _MAX_SCORES):
            return "labels-look-continuous"
    if len(counts) > _MAX_LABELS or (2 * len(counts) > rows and len(counts) > _MAX_UNIQUE):
        return "labels-look-like-text"
    return None


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
        first = first_location(rows, label, problem_type)
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


def first_location(rows: StoredRows, label: str, problem_type: str | None) -> str:
    """Where the first row with a label stands: `file:line`."""
    written = (each for each in rows.table["label"].unique().to_pylist() if label in names([each], problem_type))
    return rows.location(_first_row(rows, next(written)))


def label_lists(labels: pa.ChunkedArray, problem_type: str | None) -> pa.ListArray:
    """The labels of each row."""
    if problem_type == MULTI_LABEL:
        of_row = {label: names([label], problem_type) for label in labels.unique().to_pylist()}
        return pa.array([of_row[label] for label in labels.to_pylist()], pa.list_(pa.string()))
    return pa.ListArray.from_arrays(np.arange(len(labels) + 1, dtype=np.int32), labels.combine_chunks())


def _first_row(rows: StoredRows, label: str) -> int:
    return int(pc.index(rows.table["label"], label).as_py())


def _is_score(label: str) -> bool:
    """Whether a label is a number that float32 holds. -100 marks rows that do not count."""
    try:
        score = float(label)
    except ValueError:
        return False
    return abs(score) <= _LARGEST and score != IGNORED_LABEL


def _are_numbers(labels: Collection[str]) -> bool:
    return all(map(_NUMBER.fullmatch, labels))
