"""Whether two classifiers differ by more than chance on the same rows: paired bootstrap, and McNemar's test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, binomtest

from indictune.console_text import table
from indictune.evaluation.confusion import Confusion
from indictune.evaluation.intervals import Estimate, estimate, resampled_counts


@dataclass(frozen=True)
class Difference:
    """The macro-F1 of two classifiers on some rows.

    Attributes:
        num_examples: how many rows.
        first: macro-F1 of the first.
        second: macro-F1 of the second.
        difference: the second less the first, with its 95% interval from a paired bootstrap.
    """

    num_examples: int
    first: float
    second: float
    difference: Estimate

    @property
    def is_more_than_chance(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0


@dataclass(frozen=True)
class McNemar:
    """McNemar's test of the accuracies.

    Attributes:
        only_first: rows that only the first classifier gets right.
        only_second: rows that only the second one gets right.
        exact_p: two-sided binomial p-value.
        mid_p: the same, with half of the probability of what was seen (Fagerland et al. 2013): less cautious.
    """

    only_first: int
    only_second: int
    exact_p: float
    mid_p: float


@dataclass(frozen=True)
class Comparison:
    """Two classifiers on the same rows: overall, by language, and by McNemar's test."""

    overall: Difference
    by_language: dict[str, Difference]
    mcnemar: McNemar


def compare(references: np.ndarray, first: np.ndarray, second: np.ndarray, languages: Sequence[str]) -> Comparison:
    """Compare two classifiers.

    Args:
        references: class ids, int [rows].
        first: class ids that the first classifier predicts, int [rows].
        second: likewise of the second.
        languages: of each row, [rows].
    """
    num_labels = int(max(each.max() for each in (references, first, second))) + 1
    of_row = np.asarray(languages, dtype=object)
    masks = {language: of_row == language for language in sorted(set(languages))}
    by_language = {
        language: difference_of(references[mask], first[mask], second[mask], num_labels)
        for language, mask in masks.items()
    }
    overall = difference_of(references, first, second, num_labels)
    return Comparison(overall, by_language, mcnemar(first == references, second == references))


def difference_of(references: np.ndarray, first: np.ndarray, second: np.ndarray, num_labels: int) -> Difference:
    """The macro-F1 of two classifiers, and their difference; arguments as of `compare`, with the labels' number."""
    cells, counts = np.unique((references * num_labels + first) * num_labels + second, return_counts=True)
    pairs, of_second = np.divmod(cells, num_labels)
    present, of_first = np.divmod(pairs, num_labels)
    sides = [Confusion(present, predicted, counts, num_labels) for predicted in (of_first, of_second)]
    ours, theirs = (float(side.macro_f1(counts)) for side in sides)
    samples = [sides[1].macro_f1(some) - sides[0].macro_f1(some) for some in resampled_counts(counts)]
    return Difference(len(references), ours, theirs, estimate(theirs - ours, np.concatenate(samples)))


def mcnemar(first_right: np.ndarray, second_right: np.ndarray) -> McNemar:
    """McNemar's exact and mid-p test; bool [rows] each."""
    only_first, only_second = int((first_right & ~second_right).sum()), int((second_right & ~first_right).sum())
    fewer, all_of_them = min(only_first, only_second), only_first + only_second
    if not all_of_them:
        return McNemar(0, 0, 1.0, 1.0)
    exact = float(binomtest(fewer, all_of_them).pvalue)
    seen = float(binom.pmf(fewer, all_of_them, 0.5))
    return McNemar(only_first, only_second, exact, exact - (seen / 2 if only_first == only_second else seen))


def comparison_table(found: Comparison, names: tuple[str, str]) -> str:
    """The macro-F1 of both by language and of all rows, and the interval of the difference."""

    def line(name: str, row: Difference) -> list[str]:
        gap = row.difference
        numbers = [f"{row.first:.4f}", f"{row.second:.4f}", f"{gap.value:+.4f}", f"{gap.low:+.4f} to {gap.high:+.4f}"]
        return [name, f"{row.num_examples:,}", *numbers]

    header = ["language", "examples", *names, "difference", "95% interval"]
    body = [line(language, row) for language, row in found.by_language.items()]
    return table(header, body, footer=line("all", found.overall))


def verdict(found: Comparison, names: tuple[str, str]) -> str:
    """A sentence that says whether the difference in macro-F1 is more than chance, and one on the accuracy."""
    overall, test = found.overall, found.mcnemar
    better, worse = names if overall.difference.value < 0 else names[::-1]
    if overall.is_more_than_chance:
        first = f"{better} is better than {worse} in macro-F1, by more than chance: the 95% interval excludes 0."
    else:
        first = f"{names[0]} and {names[1]} tie in macro-F1: the 95% interval of the difference includes 0."
    second = (
        f"Of the rows that one alone gets right, {names[0]} has {test.only_first:,} and {names[1]} "
        f"{test.only_second:,}: McNemar's mid-p is {test.mid_p:.3g} (exact {test.exact_p:.3g})."
    )
    return f"{first}\n{second}"
