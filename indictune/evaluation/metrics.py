"""Metrics of a classifier: the `eval` and `test` blocks of `metrics.json`, from one prediction and one loss a row."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import evaluate
import numpy as np
from datasets import Features, Value
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support

_MARKUP = re.compile(r"[\x00-\x1f\x7f<>&|`\[\]()\\:\"'!*#]")

INPUTS_DESCRIPTION = """
Args:
    predictions: class id that the model chose, one a row.
    references: class id that is right, one a row.
    losses: loss of the row in nats, one a row.
    languages: language of the row, one a row.
"""


class ClassificationMetrics(evaluate.Metric):  # type: ignore[misc]  # evaluate carries no types: Metric is Any
    """`classification_metrics` as an `evaluate.Metric`: no network, no files, any number of processes side by side.

        metric = ClassificationMetrics(["negative", "neutral", "positive"])
        metric.compute(predictions=[0, 2], references=[0, 1], losses=[0.1, 1.9], languages=["hi", "ta"])

    It needs the rows of all ranks: gather them first. `evaluate`'s own gathering (`num_process`) goes through files
    and their locks, which is why it is not offered. Rows may also come by `add_batch`, before a `compute()`.

    Args:
        label_names: name of each class, in the order of the class ids.
    """

    def __init__(self, label_names: Sequence[str]) -> None:
        self.label_names = list(label_names)
        # Metric makes a cache folder under the user's home even where it then keeps the rows in memory and never
        # writes there (evaluate 0.4.6). A folder that is gone at once serves as well.
        with tempfile.TemporaryDirectory() as never_written:
            super().__init__(keep_in_memory=True, cache_dir=never_written)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Loss, accuracy and macro-F1 of a classifier, overall, per language and per label.",
            citation="",
            inputs_description=INPUTS_DESCRIPTION,
            features=Features(
                {
                    # Class ids travel as floats: an integer feature turns a 0.9 into class 0 without a word.
                    "predictions": Value("float64"),
                    "references": Value("float64"),
                    "losses": Value("float64"),
                    "languages": Value("string"),
                }
            ),
            format=None,  # "numpy" would round the losses to float32
        )

    def _compute(
        self,
        predictions: list[float],
        references: list[float],
        losses: list[float],
        languages: list[str],
    ) -> dict[str, Any]:
        return classification_metrics(
            predictions=predictions,
            references=references,
            losses=losses,
            languages=languages,
            label_names=self.label_names,
        )


def classification_metrics(
    *,
    predictions: ArrayLike,
    references: ArrayLike,
    losses: ArrayLike,
    languages: Sequence[str],
    label_names: Sequence[str],
) -> dict[str, Any]:
    """Compute the metrics of one file. The order of the rows does not matter, to the last bit.

    Args:
        predictions: class ids that the model chose, [num_rows].
        references: class ids that are right, [num_rows].
        losses: row losses in nats, [num_rows].
        languages: language of each row, [num_rows].
        label_names: name of each class, in the order of the class ids, [num_labels].

    Returns:
        Plain ints, floats and dicts, ready for JSON, all scores from 0 to 1:

        - `num_examples`, `accuracy`, and `loss`, the mean of the row losses, NaN if one of them is;
        - `macro_f1`: see `_accuracy_and_macro_f1`;
        - `per_language.<language>.{accuracy,macro_f1,num_examples}`, sorted by language;
        - `worst_language_macro_f1`: the smallest of these macro-F1s, however few rows the language has;
        - `per_label.<label>.{precision,recall,f1,support}`, every label of the model in the order of the class ids.
          A ratio without a denominator is 0: the precision of a label never predicted, the recall of one with support
          0. A label that is neither in `references` nor in `predictions` is all zeros here, yet not in `macro_f1`.

    Raises:
        ValueError: no rows, inputs of unequal length, a prediction or reference that is no class id, a language that
            is no string, label names that repeat.
    """
    if len(set(label_names)) != len(label_names):
        raise ValueError(f"label_names {list(label_names)} repeat a name; expected a name of its own for each class.")
    y_pred = np.asarray(predictions)
    y_true = np.asarray(references)
    row_losses = np.asarray(losses, dtype=np.float64)
    _check_shapes(predictions=y_pred, references=y_true, losses=row_losses, languages=np.empty(len(languages)))
    y_pred = _class_ids("predictions", y_pred, len(label_names))
    y_true = _class_ids("references", y_true, len(label_names))
    per_language = {
        language: {**_accuracy_and_macro_f1(y_true[rows], y_pred[rows]), "num_examples": int(rows.sum())}
        for language, rows in rows_of_languages(languages).items()
    }
    return {
        "num_examples": y_true.size,
        # fsum rounds once, at the end: the sum is the same in whatever order the ranks hand in their rows.
        "loss": math.fsum(row_losses.tolist()) / y_true.size,
        **_accuracy_and_macro_f1(y_true, y_pred),
        "worst_language_macro_f1": min(scores["macro_f1"] for scores in per_language.values()),
        "per_language": per_language,
        "per_label": _per_label(y_true, y_pred, label_names),
    }


def flatten_for_trainer(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Pick the scalars that a Trainer logs and chooses its best model by; it adds the prefix `eval_` itself.

    Args:
        metrics: what `classification_metrics` returned.

    Returns:
        `loss`, `accuracy`, `macro_f1`, `worst_language_macro_f1`, and `macro_f1_<language>` for each language.
        The Trainer writes these names into its model card and its log: what they would take for markup becomes `_`.
    """
    overall = {name: metrics[name] for name in ("loss", "accuracy", "macro_f1", "worst_language_macro_f1")}
    per_language = metrics["per_language"].items()
    return overall | {language_metric(language): row["macro_f1"] for language, row in per_language}


def language_metric(language: str) -> str:
    """What `flatten_for_trainer` calls the macro-F1 of a language."""
    return f"macro_f1_{_MARKUP.sub('_', language)}"


def _accuracy_and_macro_f1(y_true: NDArray[np.int64], y_pred: NDArray[np.int64]) -> dict[str, float]:
    """Score some rows, y_true and y_pred of [num_rows].

    The macro-F1 is scikit-learn's default, the plain mean of F1 = 2 TP / (2 TP + FP + FN) over the labels that these
    rows hold in `y_true` or `y_pred`. So a label that a language never uses does not pull that language down, while
    a single wrong prediction of such a label counts as an F1 of 0.
    """
    return {
        "accuracy": float(accuracy_score(y_true, y_pred)),
        "macro_f1": float(f1_score(y_true, y_pred, average="macro")),
    }


def _per_label(
    y_true: NDArray[np.int64], y_pred: NDArray[np.int64], label_names: Sequence[str]
) -> dict[str, dict[str, float | int]]:
    """Precision, recall, F1 and support (rows in `y_true`) of every label; y_true and y_pred are [num_rows]."""
    columns = precision_recall_fscore_support(y_true, y_pred, labels=range(len(label_names)), zero_division=0)
    return {
        name: {"precision": float(precision), "recall": float(recall), "f1": float(f1), "support": int(support)}
        for name, precision, recall, f1, support in zip(label_names, *columns, strict=True)
    }


def rows_of_languages(languages: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Map each language, sorted, to the mask of its rows, [num_rows].

    Raises:
        ValueError: a language is no string.
    """
    for row, language in enumerate(languages):
        if not isinstance(language, str):
            raise ValueError(f"languages[{row}] is {language!r}; expected a string for every row.")
    names = sorted({str(language) for language in languages})
    ids = {name: number for number, name in enumerate(names)}
    language_ids = np.fromiter((ids[language] for language in languages), np.intp, count=len(languages))
    return {name: language_ids == number for name, number in ids.items()}


def _check_shapes(**columns: NDArray[Any]) -> None:
    """Refuse columns, by name, that do not all have one entry for each of at least one row.

    Raises:
        ValueError: a column has more than one dimension, lengths differ, or there are no rows.
    """
    for name, column in columns.items():
        if column.ndim != 1:
            raise ValueError(f"{name} has the shape {list(column.shape)}; expected one number a row, [num_rows].")
    lengths = {name: column.size for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise ValueError(f"The inputs differ in their number of rows: {listed}. Expected one entry a row in each.")
    if 0 in lengths.values():
        raise ValueError("There are no rows to compute metrics of; expected at least one.")


def _class_ids(name: str, values: NDArray[Any], num_labels: int) -> NDArray[np.int64]:
    """Turn whole numbers of any type, [num_rows], into class ids.

    Raises:
        ValueError: something other than a whole number from 0 up to, not including, `num_labels`.
    """
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{name} are of type {values.dtype}; expected class ids, whole numbers from 0.")
    wrong = np.flatnonzero(~((values >= 0) & (values < num_labels) & (values == np.floor(values))))
    if wrong.size:
        raise ValueError(
            f"{name}[{wrong[0]}] is {values[wrong[0]]}; expected class ids, whole numbers from 0 to {num_labels - 1}, "
            f"for {num_labels} labels. Rows with such a value: {wrong.size:,} of {values.size:,}."
        )
    return values.astype(np.int64)
