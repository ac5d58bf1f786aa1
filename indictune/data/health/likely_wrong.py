"""Find labels that are likely wrong, from probabilities of models that have not learned the rows.

Confident learning: Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
Journal of Artificial Intelligence Research 70 (2021), https://arxiv.org/abs/1911.00068, section 3.1.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indictune.console_text import in_one_line, shown_language, table
from indictune.errors import UserError

OUT_OF_FOLD = "out_of_fold.jsonl"  # in the folder of a sweep with folds
_SHOWN = 20  # rows to look at
_MANY = 0.2  # of the rows
HEADER_OF_WRONG = ("language", "label", "rows", "likely wrong", "share")


@dataclass(frozen=True)
class WrongLabels:
    """Labels that are likely wrong.

    Attributes:
        rows: the surest first: `row` (its place), `language`, `label`, `likely`, `margin` and `text`. The margin is
            the probability of the likely label less that of the given one.
        counts: the rows of a table below `HEADER_OF_WRONG`.
        summary: what the list is worth, in one or two sentences.
    """

    rows: Sequence[Mapping[str, Any]]
    counts: Sequence[Sequence[str]]
    summary: str

    def __str__(self) -> str:
        """The table, and the first rows to look at."""
        lines = [f"Labels that are likely wrong: {self.summary}", table(HEADER_OF_WRONG, self.counts)]
        for each in self.rows[:_SHOWN]:
            lines.append(f"{each['row']}: {each['label']}, likely {each['likely']} (margin {each['margin']:.2f})")
            lines.append(f"  {in_one_line(each['text'])}")
        if len(self.rows) > _SHOWN:
            lines.append(f"{len(self.rows) - _SHOWN:,} more are listed by --json true.")
        return "\n".join(lines)


def confidently_wrong(labels: np.ndarray, probabilities: np.ndarray) -> list[tuple[int, int, float]]:
    """The rows off the diagonal of the confident joint, by falling margin: number, likely label, margin.

    A row is counted into the joint with its likeliest label among those whose probability reaches the label's
    threshold: the mean probability of the label over the rows that have it. `labels` are class ids, int [rows], and
    `probabilities` float [rows, labels].
    """
    given = probabilities[np.arange(len(labels)), labels]
    thresholds = np.full(probabilities.shape[1], np.inf)  # of a label that no row has
    for label in np.unique(labels):
        thresholds[label] = given[labels == label].mean()
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    likely = confident.argmax(1)
    wrong = np.flatnonzero((confident.max(1) >= 0) & (likely != labels))
    margins = confident[wrong, likely[wrong]] - given[wrong]
    order = np.argsort(-margins, kind="stable")
    return list(zip(wrong[order].tolist(), likely[wrong][order].tolist(), margins[order].tolist(), strict=True))


def read_out_of_fold(file: Path) -> list[dict[str, Any]]:
    """The rows of `out_of_fold.jsonl`; a `UserError` if it is not there or is damaged."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        if not rows or not all({"row", "text", "language", "label", "scores"} <= row.keys() for row in rows):
            raise ValueError("it has no rows, or a row lacks something")
    except OSError:
        raise UserError("no-out-of-fold", "--from_folds", file.parent, file=file.name) from None
    except (ValueError, AttributeError) as error:
        raise UserError("unreadable", "--from_folds", file, reason=error) from error
    return rows


def wrong_labels(rows: Sequence[Mapping[str, Any]]) -> WrongLabels:
    """The labels that are likely wrong among rows of `out_of_fold.jsonl`."""
    names = sorted({name for row in rows for name in (row["label"], *row["scores"])})
    labels = np.array([names.index(row["label"]) for row in rows])
    probabilities = np.array([[row["scores"].get(name, 0.0) for name in names] for row in rows])
    kept = ("row", "language", "label", "text")
    found = [
        {"likely": names[likely], "margin": margin} | {name: rows[at][name] for name in kept}
        for at, likely, margin in confidently_wrong(labels, probabilities)
    ]
    wrong, counts = Counter((row["language"], row["label"]) for row in found), list[list[str]]()
    for key, count in sorted(Counter((row["language"], row["label"]) for row in rows).items()):
        counts.append([shown_language(key[0]), key[1], f"{count:,}", f"{wrong[key]:,}", f"{wrong[key] / count:.1%}"])
    agreement = (probabilities.argmax(1) == labels).mean()
    summary = f"{len(found):,} of {len(rows):,} rows, by models that agree with {agreement:.0%} of the labels."
    if len(found) > _MANY * len(rows):
        summary += " So many say more of the models than of the labels."
    return WrongLabels(found, counts, summary)
