"""Metrics of the package `evaluate`, by Hub name or as files: `--metrics` adds their scores to those of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Real
from typing import Any

from huggingface_hub.constants import HF_HUB_OFFLINE

from indictune.errors import Problems, UserError, problem
from indictune.evaluation.breakdown import Breakdown, Group, rows_by_value, without_markup
from indictune.evaluation.uncertainty import Estimate
from indictune.python_objects import FUNCTION, functions_of_program

FLAG = "--metrics"
SHORT_NAMES = {"mcc": "matthews_correlation"}  # of which the Hub knows the long ones alone
# Entries of a block of `metrics.json`, or of the Trainer's metrics, that are no scores.
_RESERVED = {"num_examples", "num_tokens", "num_tags", "threshold", "per_language", "per_label", "per_entity"}
_RESERVED |= {"runtime", "samples_per_second", "steps_per_second", "epoch"}
# Two rows that are predicted right, by what a task compares (`Task.compares`).
INVENTED: dict[str, list[Any]] = {
    "single_label_classification": [0, 1],
    "multi_label_classification": [[1, 0], [0, 1]],
    "regression": [0.5, -1.5],
    "tags": [["B-PER", "I-PER", "O"], ["O", "B-LOC"]],
    "texts": ["the first of two answers", "दूसरा उत्तर यह रहा"],
}


class OwnMetric:
    """A metric of `evaluate`, or a function of the program that has started the run.

    Its failures are a `UserError`; its numbers have the `names` that the first ones had.
    """

    def __init__(self, given: str) -> None:
        self._given, self.names = given, tuple[str, ...]()
        if given.startswith(FUNCTION):
            self._module: Any = _Function(given)
            return
        try:
            import evaluate  # slow

            # evaluate (0.4.6) has a variable of its own for this, and tells a server the name of each metric.
            evaluate.config.HF_EVALUATE_OFFLINE = evaluate.config.HF_EVALUATE_OFFLINE or HF_HUB_OFFLINE
            evaluate.config.HF_UPDATE_DOWNLOAD_COUNTS = False
            name = given if os.path.exists(given) else SHORT_NAMES.get(given, given)
            self._module = evaluate.load(name, keep_in_memory=True)
        except (Exception, SystemExit) as error:
            raise UserError("metric-not-loaded", FLAG, given, reason=f"{type(error).__name__}: {error}") from error

    def scores(self, predictions: Sequence[Any], references: Sequence[Any], rows: str) -> dict[str, float]:
        """Its numbers, by predictions and right answers, [rows] each; an error calls these `rows`."""
        try:
            found = self._module.compute(predictions=predictions, references=references)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError("metric-fails", FLAG, self._given, rows=rows, reason=reason) from error
        entries = found.items() if isinstance(found, Mapping) else ()
        numbers = {without_markup(str(name)): float(value) for name, value in entries if isinstance(value, Real)}
        self.names = self.names or tuple(numbers)
        found = {name: numbers.get(name, math.nan) for name in self.names}
        if not found or not all(map(math.isfinite, found.values())):
            reason = ", ".join(f"its {name} is {value}" for name, value in found.items()) or "it returns no number"
            raise UserError("metric-fails", FLAG, self._given, rows=rows, reason=reason)
        return found


class _Function:
    """A function of the program that has started the run, as a metric; a `UserError` if it is not there."""

    def __init__(self, given: str) -> None:
        self.name = given.removeprefix(FUNCTION)
        functions = functions_of_program()["metrics"]
        if self.name not in functions:
            raise UserError("metric-of-program", FLAG, given, name=self.name)
        self._function = functions[self.name]

    def compute(self, predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
        """Its number, by the right answers and the predictions, in the order of scikit-learn."""
        return {self.name: float(self._function(references, predictions))}


_published_metric = cache(OwnMetric)


def own_metric(given: str) -> OwnMetric:
    """The metric of that name. A function is read anew: the program may have changed it."""
    return OwnMetric(given) if given.startswith(FUNCTION) else _published_metric(given)


def names_of_scores(given: Sequence[str], trusts: bool, compares: str, is_taken: Callable[[str], bool]) -> list[str]:
    """The names of the scores of metrics, tried on `INVENTED[compares]`; a `UserError` with all that is wrong."""
    if not trusts and (foreign := [each for each in given if not each.startswith(FUNCTION)]):
        raise UserError(problems=[problem("metric-not-trusted", FLAG, each) for each in foreign])
    problems, names, rows = Problems(), list[str](), INVENTED[compares]
    for each in given:
        with problems.collecting():
            for name in own_metric(each).scores(rows, rows, "two invented rows"):
                if name in (*_RESERVED, *names) or is_taken(name):
                    problems.append(problem("metric-name-taken", FLAG, each, name=name))
                names.append(name)
    problems.raise_any()
    return names


@dataclass(frozen=True)
class OwnScores:
    """Scores by name, of all rows and of each language: NaN where a metric fails on the rows of one language."""

    overall: dict[str, float]
    by_language: dict[str, dict[str, float]]

    def beside(self, found: Breakdown) -> Breakdown:
        """A breakdown with these scores too. They have no intervals; scripts and lengths have none of them."""
        languages = {name: _with(group, self.by_language[name]) for name, group in found.by["language"].items()}
        return replace(found, overall=_with(found.overall, self.overall), by=found.by | {"language": languages})

    def add_to(self, block: dict[str, Any]) -> None:
        """Add these scores to a block of `metrics.json`."""
        block |= self.overall
        for language, scores in block["per_language"].items():
            scores |= self.by_language[language]


def _with(group: Group, scores: Mapping[str, float]) -> Group:
    own = {name: Estimate(value, math.nan, math.nan) for name, value in scores.items()}
    return replace(group, scores=group.scores | own)


def score_rows(given: Sequence[str], sides: tuple[list[Any], list[Any]], languages: Sequence[str]) -> OwnScores:
    """The scores of predictions and right answers, [rows] each; a `UserError` if a metric fails on all rows."""
    rows_of = rows_by_value(languages)
    found = OwnScores({}, {language: {} for language in rows_of})
    for metric in map(own_metric, given):
        found.overall.update(metric.scores(*sides, f"{len(languages)} rows"))
        for language, rows in rows_of.items():
            predicted, right = ([side[row] for row in rows] for side in sides)
            scores = Problems().attempt(metric.scores, predicted, right, language)
            found.by_language[language].update(scores or dict.fromkeys(metric.names, math.nan))
    return found
