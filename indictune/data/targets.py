"""What a model learns of a row's label: a class id, a number, or 0 or 1 for each of several labels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from indictune.data.columns import SEPARATOR, normalise_label

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
