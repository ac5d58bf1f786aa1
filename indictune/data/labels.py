"""Labels of a run: the classes and their order, what a model learns of each, and its weight in the loss."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import yaml

from indictune.config.command_line import TextLoader
from indictune.credentials import NOT_YAML, without_its_text
from indictune.data.cache import MAX_LISTED_ROWS, StoredRows, counts_of
from indictune.data.collation import IGNORED_LABEL
from indictune.data.columns import NUMBER, ON_OFF, SEPARATOR, label_key, names_by_key, normalise_label, shortened
from indictune.errors import Problem, Problems, UserError, problem

REGRESSION = "regression"
MULTI_LABEL: Final = "multi_label_classification"
SCORE = "score"  # the only "label" of a regression


def parts(label: str) -> list[str]:
    """The labels of a row, written `a|b`; `|` alone is none."""
    return [part for each in label.split(SEPARATOR) if (part := normalise_label(each)) is not None]


def names(labels: Collection[str], problem_type: str | None) -> list[str]:
    """The distinct names among the labels of rows, unordered."""
    if problem_type == REGRESSION:
        return [SCORE]
    return list({part for label in labels for part in parts(label)}) if problem_type == MULTI_LABEL else list(labels)


def has_classes(rows: pa.Table, problem_type: str | None) -> bool:
    """Whether rows have labels, and these are no numbers of a regression."""
    return "label" in rows.schema.names and problem_type != REGRESSION


def target_type(labels: Sequence[str], problem_type: str | None) -> pa.DataType:
    """Of the targets, with the names of the labels in the order of their ids."""
    if problem_type == REGRESSION:
        return pa.float32()
    return pa.list_(pa.int8(), len(labels)) if problem_type == MULTI_LABEL else pa.int64()


def targets(rows: Sequence[str], labels: Sequence[str], problem_type: str | None) -> pa.Array:
    """The targets of rows, of which `rows` has the labels as written; `labels` has all names in order of their ids."""
    kind = target_type(labels, problem_type)
    if problem_type == REGRESSION:
        return pa.array(np.array(rows, np.float32), kind)
    class_id = {label: index for index, label in enumerate(labels)}
    if problem_type != MULTI_LABEL:
        return pa.array([class_id[label] for label in rows], kind)
    given = np.zeros((len(rows), len(labels)), np.int8)
    for row, label in zip(given, rows, strict=True):
        row[[class_id[part] for part in parts(label)]] = 1
    return pa.FixedSizeListArray.from_arrays(given.reshape(-1), len(labels))


BALANCED = "balanced"
_FLAG = "--class_weights"


def class_weights(choice: str | None, counts: Mapping[str, int], labels: Sequence[str]) -> dict[str, float] | None:
    """The weight of each label by `--class_weights`, for its number of training rows; None where all count alike.

    Raises `UserError` as `given_weights`, and if the file misses a label, or names one that no row has.
    """
    if choice is None:
        return None
    if choice == BALANCED:  # as scikit-learn's `class_weight="balanced"`
        total = sum(counts.values())
        return {label: total / (len(labels) * counts[label]) for label in labels}
    by_key, weights, problems = names_by_key(labels), dict[str, float](), Problems()
    for written, weight in (given_weights(choice) or {}).items():
        label = by_key.get(label_key(written), written)
        if label in weights:
            problems.append(problem("class-weight-twice", _FLAG, choice, label=label))
        weights[label] = weight
    for label in sorted(weights.keys() ^ set(labels)):
        code = "class-weight-unknown" if label in weights else "class-weight-missing"
        problems.append(problem(code, _FLAG, choice, label=label, labels=", ".join(labels)))
    problems.raise_any()
    return weights


def as_tensor(weights: Mapping[str, float] | None, labels: Sequence[str]) -> torch.Tensor | None:
    """The weights in the order of the class ids, float32 [labels]."""
    return None if weights is None else torch.tensor([weights[label] for label in labels])


def given_weights(path: str | None) -> dict[str, float] | None:
    """The weights by label in the file that `--class_weights` names, if any; `UserError` unless all are positive."""
    if path is None or path == BALANCED:
        return None
    try:
        # JSON is YAML too. Read as text alone: YAML takes a label `no` for a boolean and a weight 1e-1 for a string.
        content = yaml.load(Path(path).read_text(encoding="utf-8"), TextLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("class-weights-unreadable", _FLAG, path, reason=error) from error
    except NOT_YAML as error:
        raise UserError("class-weights-unreadable", _FLAG, path, reason=without_its_text(error)) from None
    if not isinstance(content, Mapping):
        raise UserError("class-weights-unreadable", _FLAG, path, reason=f"it holds a {type(content).__name__}")
    weights: dict[str, float] = {}
    problems = Problems()
    for written, weight in content.items():
        label = normalise_label(written) or ""
        if label in weights:
            problems.append(problem("class-weight-twice", _FLAG, path, label=label))
        weights[label] = float("nan")
        with suppress(ValueError):
            weights[label] = float(str(weight))
        if not 0 < weights[label] < float("inf"):
            problems.append(problem("class-weight-not-positive", _FLAG, path, label=label, weight=weight))
    problems.raise_any()
    return weights


AnyRows = TypeVar("AnyRows", bound=StoredRows)

_NUMBERS = re.compile(r"[\d\s]+")  # as numpy prints a list of them


def look_like_lists(labels: Collection[str]) -> bool:
    """Whether labels look like several a row: all in brackets, or `a|b` and `a` or `a|c`, or `|` for none."""
    if labels and (all(map(_is_bracketed, labels)) or any(not parts(label) for label in labels)):
        return True
    labels_of = Counter(part for label in labels for part in {*parts(label)})
    return any(SEPARATOR in label and any(labels_of[part] > 1 for part in parts(label)) for label in labels)


def mark_between(labels: Collection[str], is_asked: bool, known: Collection[str] = ()) -> str | None:
    """The comma, semicolon or slash between the labels of a row, where labels with it name others; None for `a|b`.

    Others are labels of other rows, and those `known` of a model. A row must name others alone, or one if `is_asked`.
    """
    if any(SEPARATOR in label or _is_bracketed(label) for label in labels):
        return None
    for mark in ",;/":
        split = [{*map(label_key, _items(label, mark))} for label in labels if label not in known]
        often = Counter(key for keys in split for key in keys) + Counter({*map(label_key, known)})
        name_others = ((often[key] > 1 for key in keys) for keys in split if len(keys) > 1)
        if any(map(any if is_asked else all, name_others)):
            return mark
    return None


def items_of_labels(labels: Collection[str], mark: str | None, known: Collection[str]) -> dict[str, list[str]]:
    """Label as written -> the labels of its rows, written as `a|b`, as a list, or with a mark; `known` ones are whole.

    Lists of 0 and 1 that all have one length say of each label if the row has it.
    """
    items = {label: _items(label, None if label in known else mark) for label in labels}
    flags = {label: [ON_OFF.get(each.lower()) for each in of_row] for label, of_row in items.items()}
    if all(of_row[1:] and None not in of_row for of_row in flags.values()) and len({*map(len, flags.values())}) == 1:
        items = {label: [str(place) for place, is_on in enumerate(row) if is_on] for label, row in flags.items()}
    return items


def _items(label: str, mark: str | None) -> list[str]:
    if not _is_bracketed(label):
        return parts(label.replace(mark, SEPARATOR) if mark and label.lower() != "n/a" else label)
    inside = label[1:-1]
    between = r"\s+" if _NUMBERS.fullmatch(inside) else ","
    return [item for each in re.split(between, inside) if (item := normalise_label(each.strip().strip("'\"")))]


def _is_bracketed(label: str) -> bool:
    return label.startswith("[") and label.endswith("]")


_MAX_LABELS = 1000
_MAX_SCORES = 10
_MAX_FRACTIONS = 4
_MAX_CLASS_NUMBERS = 50
_MAX_UNIQUE = 20  # labels, if there is nearly one for each row
_MAX_LISTED = 5
_LARGEST = float(np.finfo(np.float32).max)


def checked_labels(
    train: StoredRows, held_out: Sequence[StoredRows], column: str, problem_type: str | None
) -> list[str]:
    """The names of the labels in the order of their ids: by number if all are numbers, else by the alphabet.

    Raises `UserError` for labels of a regression that are no numbers; of a classification, for scores, free text, a
    single label, or others in held-out rows.
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
    """Code of the problem with labels that look like no classes: scores, free text and their like.

    Scores are five numbers or more with fractions, such as 0.5, 1, ... 5; more than ten in steps, such as 0, 5, ...
    100; or more than fifty whole ones.
    """
    if len(counts) < 2:
        return "one-label"
    if problem_type != MULTI_LABEL and not all(map(parts, counts)):
        return "bar-is-no-label"
    if problem_type is None and look_like_lists(counts):
        return "labels-look-like-lists"
    if problem_type is None and _are_numbers(counts):
        numbers = [float(label) for label in counts]
        are_whole = all(number.is_integer() for number in numbers)
        are_class_numbers = are_whole and math.gcd(*(int(number - numbers[0]) for number in numbers)) == 1
        most = _MAX_CLASS_NUMBERS if are_class_numbers else _MAX_SCORES if are_whole else _MAX_FRACTIONS
        if len(counts) > most:
            return "labels-look-continuous"
    if len(counts) > _MAX_LABELS or (2 * len(counts) > rows and len(counts) > _MAX_UNIQUE):
        return "labels-look-like-text"
    return None


def not_numbers(rows: StoredRows) -> list[Problem]:
    """A problem for each of the first few labels that a regression cannot learn."""
    found = islice((label for label in label_counts(rows) if not _is_score(label)), _MAX_LISTED)
    places = ((label, first_location(rows, label, None)) for label in found)
    return [problem("label-not-number", rows.origin, where, label=shortened(label)) for label, where in places]


def unknown_labels(rows: StoredRows, known: Collection[str], problem_type: str | None = None) -> list[Problem]:
    """A problem for each of the first few labels that are not `known`, and one for the others."""
    if problem_type == REGRESSION:
        return not_numbers(rows)
    unknown = {label: count for label, count in label_counts(rows, problem_type).items() if label not in known}
    labels = ", ".join(map(shortened, sorted(known)[:MAX_LISTED_ROWS]))
    problems = []
    for label, count in islice(unknown.items(), _MAX_LISTED):
        details = {"label": shortened(label), "first": first_location(rows, label, problem_type), "known": labels}
        problems.append(problem("label-unknown", rows.origin, rows.source, count=count, **details))
    if len(unknown) > _MAX_LISTED:
        problems.append(problem("more-unknown-labels", rows.origin, rows.source, count=len(unknown) - _MAX_LISTED))
    return problems


def label_counts(rows: StoredRows, problem_type: str | None = None) -> dict[str, int]:
    """Label -> number of rows. A row of several labels counts for each."""
    counts = counts_of(rows.table["label"])
    if problem_type != MULTI_LABEL:
        return counts
    of_parts: Counter[str] = Counter()
    for label, count in counts.items():
        of_parts.update(dict.fromkeys(names([label], problem_type), count))
    return dict(of_parts)


def first_location(rows: StoredRows, label: str, problem_type: str | None) -> str:
    """Where the first row with a label stands: `file:line`."""
    written = (each for each in rows.table["label"].unique().to_pylist() if label in names([each], problem_type))
    return rows.location(int(pc.index(rows.table["label"], next(written)).as_py()))


def with_counts(labels: Sequence[str], counts: Mapping[str, int]) -> str:
    """The first labels, each with its number of rows or words; one with a comma in quotes."""
    shown = [repr(shortened(each)) if "," in each else shortened(each) for each in labels[:MAX_LISTED_ROWS]]
    more = [f"and {len(labels) - MAX_LISTED_ROWS:,} more"] if len(labels) > MAX_LISTED_ROWS else []
    return ", ".join([*(f"{name} {counts.get(each, 0):,}" for name, each in zip(shown, labels, strict=False)), *more])


def label_lists(labels: pa.ChunkedArray, problem_type: str | None) -> pa.ListArray:
    """The labels of each row."""
    if problem_type == MULTI_LABEL:
        of_row = {label: names([label], problem_type) for label in labels.unique().to_pylist()}
        return pa.array([of_row[label] for label in labels.to_pylist()], pa.list_(pa.string()))
    return pa.ListArray.from_arrays(np.arange(len(labels) + 1, dtype=np.int32), labels.combine_chunks())


def _is_score(label: str) -> bool:
    """Whether a label is a number that float32 holds. -100 marks rows that do not count."""
    try:
        score = float(label)
    except ValueError:
        return False
    return abs(score) <= _LARGEST and score != IGNORED_LABEL


def _are_numbers(labels: Collection[str]) -> bool:
    return all(map(NUMBER.fullmatch, labels))
