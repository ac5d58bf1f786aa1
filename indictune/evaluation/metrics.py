"""Metrics of a classifier, and what the metrics of all tasks share: every score over all rows and per language."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MARKUP = re.compile(r"[\x00-\x1f\x7f<>&|`\[\]()\\:\"'!*#]")

# The scores of the rows that a mask [rows] chooses.
Score = Callable[[NDArray[np.bool_]], dict[str, float]]


def scores_by_language(
    score: Score, losses: ArrayLike, languages: Sequence[str], count: int | None = None
) -> dict[str, Any]:
    """The block of `metrics.json` that all tasks have: `num_examples`, `loss`, the scores, and `per_language`.

    The loss is rounded once, after the sum, so it does not depend on the order of the rows. It is NaN if one is.

    Args:
        score: gives the scores of some rows.
        losses: of each row, [rows].
        languages: of each row, [rows].
        count: divisor of the summed losses. Default: the number of rows.
    """
    of_row = np.asarray(languages, dtype=object)
    masks = {language: of_row == language for language in sorted(set(map(str, languages)))}
    return {
        "num_examples": len(of_row),
        "loss": math.fsum(np.asarray(losses, np.float64).tolist()) / (len(of_row) if count is None else count),
        **score(np.ones(len(of_row), dtype=np.bool_)),
        "per_language": {
            language: {"num_examples": int(mask.sum()), **score(mask)} for language, mask in masks.items()
        },
    }


def label_scores(columns: Sequence[Any], label_names: Sequence[str]) -> dict[str, dict[str, float | int]]:
    """`<label>.{precision,recall,f1,support}` from scikit-learn's four columns, each [labels]."""
    return {
        name: {"precision": float(precision), "recall": float(recall), "f1": float(f1), "support": int(support)}
        for name, precision, recall, f1, support in zip(label_names, *columns, strict=True)
    }


def classification_metrics(
    *,
    predictions: ArrayLike,
    references: ArrayLike,
    losses: ArrayLike,
    languages: Sequence[str],
    label_names: Sequence[str],
) -> dict[str, Any]:
    """Score one label a row, from 0 to 1.

    The macro-F1 is the mean F1 of the labels that the rows have or that were predicted. A label that a language never
    uses therefore does not lower the macro-F1 of that language. A single wrong prediction of it counts as an F1 of 0.

    Args:
        predictions: class ids, int [rows].
        references: class ids, int [rows].
        losses: of each row in nats, [rows].
        languages: of each row, [rows].
        label_names: in the order of the class ids.

    Returns:
        `scores_by_language` with `accuracy` and `macro_f1`; `worst_language_macro_f1`, however few rows the language
        has; and `per_label` with every label of the model. A ratio without a denominator is 0.
    """
    from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support  # slow to import

    predicted, right = np.asarray(predictions), np.asarray(references)

    def score(rows: NDArray[np.bool_]) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(right[rows], predicted[rows])),
            "macro_f1": float(f1_score(right[rows], predicted[rows], average="macro")),
        }

    block = scores_by_language(score, losses, languages)
    columns = precision_recall_fscore_support(right, predicted, labels=range(len(label_names)), zero_division=0)
    worst = min(each["macro_f1"] for each in block["per_language"].values())
    return block | {"worst_language_macro_f1": worst, "per_label": label_scores(columns, label_names)}


def flatten_for_trainer(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `classification_metrics` that the Trainer logs and compares checkpoints by.

    They are `loss`, `accuracy`, `macro_f1`, `worst_language_macro_f1`, `macro_f1_<language>` for each language, and
    `f1_<label>` for each label.
    """
    overall = {name: metrics[name] for name in ("loss", "accuracy", "macro_f1", "worst_language_macro_f1")}
    per_language = metrics["per_language"].items()
    per_label = {label_metric(label): row["f1"] for label, row in metrics["per_label"].items()}
    return overall | {language_metric(language): row["macro_f1"] for language, row in per_language} | per_label


def without_markup(name: str) -> str:
    """A language or label in a metric's name. The Trainer's model card would take some characters for markup."""
    return _MARKUP.sub("_", name)


def language_metric(language: str) -> str:
    """The flat name of a language's macro-F1."""
    return f"macro_f1_{without_markup(language)}"


def label_metric(label: str) -> str:
    """The flat name of a label's F1."""
    return f"f1_{without_markup(label)}"
