"""Whether two runs differ by more than chance on the same rows (`--compare`): paired bootstrap, and McNemar's test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from indictune.console_text import printable, table
from indictune.errors import UserError
from indictune.evaluation.breakdown import SPLITS, rows_by_value
from indictune.evaluation.scorers import Confusion
from indictune.evaluation.uncertainty import Estimate, estimate, resampled_counts
from indictune.files import PREDICTIONS

_FLAG = "--compare"
PredictedRow = tuple[str, str, str, str]  # its id, label, predicted label and language


@dataclass(frozen=True)
class Difference:
    """The macro-F1 of two classifiers; `difference` is the second less the first, by a paired bootstrap."""

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
    """McNemar's test of the accuracies: rows that one classifier alone gets right, and two-sided binomial p-values.

    `mid_p` takes half of the probability of what was seen (Fagerland et al. 2013): less cautious.
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


def compare_classifiers(
    references: np.ndarray, first: np.ndarray, second: np.ndarray, languages: Sequence[str]
) -> Comparison:
    """Compare two classifiers: `references` and their predictions are class ids, int [rows]."""
    num_labels = int(max(each.max() for each in (references, first, second))) + 1
    by_language = {
        language: difference_of(references[rows], first[rows], second[rows], num_labels)
        for language, rows in rows_by_value(languages).items()
    }
    overall = difference_of(references, first, second, num_labels)
    return Comparison(overall, by_language, mcnemar(first == references, second == references))


def difference_of(references: np.ndarray, first: np.ndarray, second: np.ndarray, num_labels: int) -> Difference:
    """The macro-F1 of two classifiers, and their difference; arguments as of `compare_classifiers`, and their number.

    Predictions may be int [repeats, rows]: the scores of repeats are averaged, within each draw of rows too.
    """
    ours, theirs = np.atleast_2d(first), np.atleast_2d(second)
    counts, sides = _cells(references, np.concatenate([ours, theirs]), num_labels)
    both = sides[: len(ours)], sides[len(ours) :]
    one, other = (float(_mean_f1(each, counts)) for each in both)
    samples = [_mean_f1(both[1], some) - _mean_f1(both[0], some) for some in resampled_counts(counts)]
    return Difference(len(references), one, other, estimate(other - one, np.concatenate(samples)))


def macro_f1_of(references: np.ndarray, predictions: np.ndarray, num_labels: int) -> Estimate:
    """The mean macro-F1 of repeats, int [repeats, rows], with its interval by resampled rows."""
    counts, sides = _cells(references, predictions, num_labels)
    samples = [_mean_f1(sides, some) for some in resampled_counts(counts)]
    return estimate(float(_mean_f1(sides, counts)), np.concatenate(samples))


def _cells(references: np.ndarray, predictions: np.ndarray, num_labels: int) -> tuple[np.ndarray, list[Confusion]]:
    """Rows with one label and the same predictions by all, [classifiers, rows], as a cell: its count, and who says."""
    (present, *predicted), counts = np.unique(np.vstack([references, predictions]), axis=1, return_counts=True)
    return counts, [Confusion(present, each, counts, num_labels) for each in predicted]


def _mean_f1(repeats: Sequence[Confusion], counts: np.ndarray) -> np.ndarray:
    mean: np.ndarray = np.mean([each.macro_f1(counts) for each in repeats], axis=0)
    return mean


def mcnemar(first_right: np.ndarray, second_right: np.ndarray) -> McNemar:
    """McNemar's exact and mid-p test; bool [rows] each."""
    from scipy.stats import binom, binomtest  # slow to import

    only_first, only_second = int((first_right & ~second_right).sum()), int((second_right & ~first_right).sum())
    fewer, all_of_them = min(only_first, only_second), only_first + only_second
    if not all_of_them:
        return McNemar(0, 0, 1.0, 1.0)
    exact = float(binomtest(fewer, all_of_them).pvalue)
    seen = float(binom.pmf(fewer, all_of_them, 0.5))
    return McNemar(only_first, only_second, exact, exact - (seen / 2 if only_first == only_second else seen))


def _table(found: Comparison) -> str:
    """The macro-F1 of both by language and of all rows, and the interval of the difference."""

    def line(name: str, row: Difference) -> list[str]:
        gap = row.difference
        numbers = [f"{row.first:.4f}", f"{row.second:.4f}", f"{gap.value:+.4f}", f"{gap.low:+.4f} to {gap.high:+.4f}"]
        return [name, f"{row.num_examples:,}", *numbers]

    header = ["language", "examples", "A", "B", "difference", "95% interval"]
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


def print_comparison(folders: Sequence[str], as_json: bool) -> int:
    """Print a table of two runs or evaluations, and whether they differ by more than chance; returns the exit code.

    Raises:
        UserError: there are not two, one has no predictions of one label a row, or they scored other rows.
    """
    if len(folders) != 2:
        raise UserError("compare-two-runs", _FLAG, " ".join(folders))
    both = [read_predictions(Path(folder)) for folder in folders]
    # The first that both runs have.
    split = next((split for split in SPLITS if all(split in each for each in both)), None)
    if split is None:
        raise UserError("compare-no-common-rows", _FLAG, " ".join(folders))
    first, second = (each[split] for each in both)
    differing = sum(a[:2] != b[:2] for a, b in zip(first, second, strict=False)) + abs(len(first) - len(second))
    if differing:
        raise UserError("compare-other-rows", _FLAG, " ".join(folders), split=SPLITS[split], rows=differing)
    _, labels, of_first, languages = zip(*first, strict=True)
    of_second = [predicted for _, _, predicted, _ in second]
    names = sorted({*labels, *of_first, *of_second})
    number = {name: at for at, name in enumerate(names)}
    right, ours, theirs = (np.array([number[name] for name in each]) for each in (labels, of_first, of_second))
    found = compare_classifiers(right, ours, theirs, languages)
    if as_json:
        print(json.dumps({"runs": list(folders), "split": split, **asdict(found)}, indent=2, ensure_ascii=False))
        return 0
    print(printable(f"A: {folders[0]}\nB: {folders[1]}\n\nmacro-F1 of {len(first):,} {SPLITS[split]} rows"))
    print(_table(found), verdict(found, ("A", "B")), sep="\n\n")
    return 0


def read_predictions(folder: Path) -> dict[str, list[PredictedRow]]:
    """The rows that a run has predicted, by split; a `UserError` if it has none with one label a row."""
    found: dict[str, list[PredictedRow]] = {}
    try:
        with (folder / PREDICTIONS).open(encoding="utf-8") as file:
            for row in map(json.loads, file):
                if not (isinstance(row["label"], str) and isinstance(row["predicted"], str)):
                    raise TypeError(row["label"])
                kept = row["id"], row["label"], row["predicted"], row["language"]
                found.setdefault(row["split"], []).append(kept)
    except OSError as error:
        raise UserError("compare-needs-predictions", _FLAG, folder, missing=PREDICTIONS) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("compare-one-label-a-row", _FLAG, folder, file=PREDICTIONS) from error
    return found
