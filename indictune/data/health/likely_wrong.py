"""Find labels that are likely wrong, from probabilities of models that have not learned the rows.

Confident learning: Northcutt, Jiang and Chuang, "Confident Learning: Estimating Uncertainty in Dataset Labels",
Journal of Artificial Intelligence Research 70 (2021), https://arxiv.org/abs/1911.00068, section 3.1.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from indictune.console_text import in_one_line, shown_language, table
from indictune.data.cache import StoredRows, text_id
from indictune.errors import UserError

OUT_OF_FOLD = "out_of_fold.jsonl"  # in the folder of a sweep with folds
_SHOWN = 20  # rows to look at
_MANY = 0.2  # of the rows
HEADER_OF_WRONG = ("language", "label", "rows", "likely wrong", "share", "likely labels")


@dataclass(frozen=True)
class LikelyWrong:
    """A row whose label is likely wrong: its place and text, the given label, and the likely one.

    `margin` is the probability of the likely label less that of the given one.
    """

    row: str
    language: str
    given: str
    likely: str
    margin: float
    text: str


@dataclass(frozen=True)
class WrongLabels:
    """The rows whose label is likely wrong, the surest first, of the number of `rows` of each language and label.

    The models predict the share `agreement` of the labels. Of the rows of the folds, `gone` are no longer in the
    files, and `relabelled` have another label now.
    """

    found: Sequence[LikelyWrong]
    rows: Mapping[tuple[str, str], int]
    agreement: float = 0.0
    gone: int = 0
    relabelled: int = 0

    @property
    def summary(self) -> str:
        """What the list is worth, in one or two sentences."""
        found, rows = len(self.found), sum(self.rows.values())
        shown = f"{found:,} of {rows:,} rows, by models that agree with {self.agreement:.0%} of the labels."
        return f"{shown} So many say more of the models than of the labels." if found > _MANY * rows else shown

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """The rows that were found, by language and label."""
        return Counter((each.language, each.given) for each in self.found)

    def table_rows(self) -> list[list[str]]:
        """The rows of a table below `HEADER_OF_WRONG`."""
        counts, meant = self.counts, defaultdict[tuple[str, str], Counter[str]](Counter)
        for each in self.found:
            meant[each.language, each.given][each.likely] += 1
        return [
            [
                *(shown_language(language), label, f"{rows:,}", f"{counts[language, label]:,}"),
                f"{counts[language, label] / rows:.1%}",
                ", ".join(f"{name} {number:,}" for name, number in meant[language, label].most_common()),
            ]
            for (language, label), rows in sorted(self.rows.items())
        ]

    def as_json(self) -> dict[str, Any]:
        """All of it, as `indictune inspect --json` prints it."""
        counts = [
            {"language": language, "label": label, "rows": rows, "likely_wrong": self.counts[language, label]}
            for (language, label), rows in sorted(self.rows.items())
        ]
        return {
            "agreement": self.agreement,
            "gone": self.gone,
            "relabelled": self.relabelled,
            "counts": counts,
            "rows": [asdict(each) for each in self.found],
        }

    def __str__(self) -> str:
        """A table, the first rows to look at, and what has changed since."""
        lines = [f"Labels that are likely wrong: {self.summary}"]
        lines += [table(HEADER_OF_WRONG, self.table_rows())] if self.rows else []
        for each in self.found[:_SHOWN]:
            lines.append(f"{each.row}: {each.given}, likely {each.likely} (margin {each.margin:.2f})")
            lines.append(f"  {in_one_line(each.text)}")
        if len(self.found) > _SHOWN:
            lines.append(f"{len(self.found) - _SHOWN:,} more are listed by --json true.")
        if self.gone:
            lines.append(f"{self.gone:,} rows of the folds are no longer in the files.")
        if self.relabelled:
            lines.append(f"{self.relabelled:,} rows of the folds have another label now, and are left out.")
        return "\n".join(lines)


def confidently_wrong(labels: np.ndarray, probabilities: np.ndarray) -> list[tuple[int, int, float]]:
    """The rows off the diagonal of the confident joint, by falling margin: number, likely label, margin.

    A row is counted into the joint with its likeliest label among those whose probability reaches the label's
    threshold: the mean probability of the label over the rows that have it. `labels` are class ids, int [rows], and
    `probabilities` float [rows, labels].
    """
    given = np.arange(len(labels)), labels
    sums = np.bincount(labels, probabilities[given], probabilities.shape[1])
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    thresholds = np.divide(sums, counts, out=np.full(len(sums), np.inf), where=counts > 0)
    confident = np.where(probabilities >= thresholds, probabilities, -1.0)
    likely = confident.argmax(1)
    wrong = np.flatnonzero((confident.max(1) >= 0) & (likely != labels))
    margins = probabilities[wrong, likely[wrong]] - probabilities[wrong, labels[wrong]]
    order = np.argsort(-margins, kind="stable")
    return list(zip(wrong[order].tolist(), likely[wrong][order].tolist(), margins[order].tolist(), strict=True))


def read_out_of_fold(file: Path) -> list[dict[str, Any]]:
    """The rows of `out_of_fold.jsonl`; a `UserError` if it is not there or is damaged."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        for row in rows:
            _ = row["row"], row["text"], row["id"], row["language"], row["label"], row["scores"][row["predicted"]]
    except OSError:
        raise UserError("no-out-of-fold", "--from_folds", file.parent, file=file.name) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError("unreadable", "--from_folds", file, reason=f"{type(error).__name__}: {error}") from error
    return rows


def wrong_labels(rows: Sequence[Mapping[str, Any]]) -> WrongLabels:
    """The labels that are likely wrong among rows of `out_of_fold.jsonl`."""
    names = sorted({*chain.from_iterable([row["label"], *row["scores"]] for row in rows)})
    labels = np.array([names.index(row["label"]) for row in rows], np.int64)
    probabilities = np.array([[row["scores"].get(name, 0.0) for name in names] for row in rows], np.float64)
    found = confidently_wrong(labels, probabilities) if rows else []
    listed = [
        LikelyWrong(rows[at]["row"], rows[at]["language"], rows[at]["label"], names[likely], margin, rows[at]["text"])
        for at, likely, margin in found
    ]
    agreement = sum(row["label"] == row["predicted"] for row in rows) / max(1, len(rows))
    return WrongLabels(listed, Counter((row["language"], row["label"]) for row in rows), agreement)


def wrong_labels_in(rows: Sequence[Mapping[str, Any]], splits: Iterable[StoredRows]) -> WrongLabels:
    """The same, of the rows whose text is still in the splits, with the same label; the others are counted."""
    now = defaultdict[str, dict[str, str]](dict)  # digest of a text -> places and labels
    for split in splits:
        for number, (text, label) in enumerate(zip(split.texts, split.table["label"].to_pylist(), strict=True)):
            now[text_id(text)][split.location(number)] = label
    kept, gone, relabelled = [], 0, 0
    for row in rows:
        places = [place for place, label in now[row["id"]].items() if label == row["label"]]
        gone += not now[row["id"]]
        relabelled += bool(now[row["id"]]) and not places
        if places:
            kept.append({**row, "row": row["row"] if row["row"] in places else places[0]})
    return replace(wrong_labels(kept), gone=gone, relabelled=relabelled)
