"""Scores of labels from counts: of how many rows have a label, were given it, and rightly so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from indictune.evaluation.breakdown import MAX_CONFUSED, Group, LabelScores
from indictune.evaluation.intervals import estimate, ratio, resampled_counts


@dataclass(frozen=True)
class LabelCounts:
    """Of each label, how often it is right, predicted, and both; each [labels] or [samples, labels]."""

    present: np.ndarray
    predicted: np.ndarray
    hits: np.ndarray

    def scores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Precision, recall and F1; a ratio without a denominator is 0."""
        both = self.present + self.predicted
        return ratio(self.hits, self.predicted), ratio(self.hits, self.present), ratio(2 * self.hits, both)

    def macro(self, each: np.ndarray) -> np.ndarray:
        """The mean over the labels that the rows have or that were predicted."""
        counts = self.present + self.predicted > 0
        return ratio((each * counts).sum(-1), counts.sum(-1))


def scores_of_labels(counts: LabelCounts, samples: LabelCounts, labels: list[str]) -> dict[str, LabelScores]:
    """The scores of each label, with intervals from `samples`."""
    names, support = ("precision", "recall", "f1"), counts.present.tolist()
    columns = list(zip(names, counts.scores(), samples.scores(), strict=True))
    return {
        label: LabelScores(
            support=support[at],
            **{name: estimate(value[at], sample[:, at]) for name, value, sample in columns},
        )
        for at, label in enumerate(labels)
    }


class Confusion:
    """Rows of one label each, counted by label and predicted label.

    Args:
        present: label of each cell, int [cells].
        predicted: predicted label of each cell, int [cells].
        counts: of the rows in each cell, int [cells].
        num_labels: of the model.
    """

    def __init__(self, present: np.ndarray, predicted: np.ndarray, counts: np.ndarray, num_labels: int) -> None:
        self.counts, self.num_labels = counts, num_labels
        self._present, self._predicted = present, predicted
        self._hits = present == predicted

    @classmethod
    def of_rows(cls, references: np.ndarray, predictions: np.ndarray, num_labels: int) -> Confusion:
        """The counts of rows with these class ids, int [rows] each."""
        cells, counts = np.unique(np.asarray(references) * num_labels + predictions, return_counts=True)
        return cls(*np.divmod(cells, num_labels), counts, num_labels)

    def label_counts(self, counts: np.ndarray) -> LabelCounts:
        """Counts of labels from counts of cells, [..., cells]."""
        return LabelCounts(
            self._summed(self._present, counts),
            self._summed(self._predicted, counts),
            self._summed(self._present[self._hits], counts[..., self._hits]),
        )

    def _summed(self, label_of_cell: np.ndarray, counts: np.ndarray) -> np.ndarray:
        ones = np.ones(len(label_of_cell), np.int64)
        places = label_of_cell, np.arange(len(label_of_cell))
        adder = csr_matrix((ones, places), shape=(self.num_labels, len(label_of_cell)))
        summed: np.ndarray = (adder @ counts.T).T
        return summed

    def macro_f1(self, counts: np.ndarray) -> np.ndarray:
        """The macro-F1 for counts of cells, [..., cells]."""
        of_labels = self.label_counts(counts)
        return of_labels.macro(of_labels.scores()[2])

    def samples(self) -> LabelCounts:
        """Counts of labels in resampled rows, [RESAMPLES, labels]."""
        parts = [self.label_counts(counts) for counts in resampled_counts(self.counts)]
        names = ("present", "predicted", "hits")
        return LabelCounts(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def matrix(self) -> list[list[int]] | None:
        """Rows by label and predicted label; None for more than 50 labels."""
        if self.num_labels > MAX_CONFUSED:
            return None
        square = np.zeros((self.num_labels, self.num_labels), np.int64)
        square[self._present, self._predicted] = self.counts
        return [[int(count) for count in row] for row in square]


def group_of_confusion(confusion: Confusion, labels: list[str]) -> Group:
    """The scores of the rows of a confusion matrix: macro-F1, precision, recall, accuracy, and those of each label."""
    counts, samples = confusion.label_counts(confusion.counts), confusion.samples()
    rows = int(confusion.counts.sum())
    columns = zip(counts.scores(), samples.scores(), strict=True)
    precision, recall, f1 = (estimate(float(counts.macro(a)), samples.macro(b)) for a, b in columns)
    accuracy = estimate(counts.hits.sum() / rows, samples.hits.sum(1) / rows)
    scores = {"macro_f1": f1, "macro_precision": precision, "macro_recall": recall, "accuracy": accuracy}
    return Group(rows, scores, scores_of_labels(counts, samples, labels), confusion.matrix())
