"""Compare two runs on the predictions that they have written: `indictune evaluate --compare RUN_A RUN_B`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indictune.config.command_arguments import EvaluateArguments
from indictune.config.recipe import read_recipe
from indictune.console_text import printable
from indictune.errors import UserError, problem
from indictune.evaluation.breakdown import SPLITS
from indictune.evaluation.comparison import compare, comparison_table, verdict
from indictune.files import PREDICTIONS

_FLAG = "--compare"


@dataclass(frozen=True)
class Predictions:
    """What a run has made of one split, each [rows]: `rows` identify a row and its label."""

    rows: list[tuple[str, str]]
    labels: list[str]
    predicted: list[str]
    languages: list[str]


def compare_command(argv: Sequence[str]) -> int:
    """Compare two folders; returns the exit code.

    Raises:
        UserError: a flag of another kind of evaluation, or as of `print_comparison`.
    """
    recipe = read_recipe(argv, (EvaluateArguments,))
    others = [name for name in recipe.values if name not in ("compare", "json")]
    recipe.problems.extend(
        problem("no-effect", f"--{name}", recipe.values[name], other="--compare") for name in others
    )
    recipe.problems.raise_any()
    return print_comparison(recipe.values["compare"], recipe.values.get("json", False))


def print_comparison(folders: Sequence[str], as_json: bool) -> int:
    """Print a table of two runs, and whether they differ by more than chance; returns the exit code.

    Args:
        folders: of two runs or evaluations.
        as_json: print all numbers as JSON instead.

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
    if first.rows != second.rows:
        differing = sum(a != b for a, b in zip(first.rows, second.rows, strict=False))
        differing += abs(len(first.rows) - len(second.rows))
        raise UserError("compare-other-rows", _FLAG, " ".join(folders), split=SPLITS[split], rows=differing)
    names = sorted({*first.labels, *first.predicted, *second.predicted})
    number = {name: at for at, name in enumerate(names)}
    right, ours, theirs = (
        np.array([number[name] for name in each]) for each in (first.labels, first.predicted, second.predicted)
    )
    found = compare(right, ours, theirs, first.languages)
    if as_json:
        print(json.dumps({"runs": list(folders), "split": split, **asdict(found)}, indent=2, ensure_ascii=False))
        return 0
    shown = ("A", "B")
    print(printable(f"A: {folders[0]}\nB: {folders[1]}\n\nmacro-F1 of {len(first.rows):,} {SPLITS[split]} rows"))
    print(f"{comparison_table(found, shown)}\n\n{verdict(found, shown)}")
    return 0


def read_predictions(folder: Path) -> dict[str, Predictions]:
    """The predictions of one label a row in a folder, by split.

    Raises:
        UserError: there are none.
    """
    found: dict[str, Predictions] = {}
    try:
        with (folder / PREDICTIONS).open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                of_split = found.setdefault(row["split"], Predictions([], [], [], []))
                _add(of_split, row)
    except OSError as error:
        raise UserError("compare-needs-predictions", _FLAG, folder, missing=PREDICTIONS) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError("compare-one-label-a-row", _FLAG, folder, file=PREDICTIONS) from error
    return found


def _add(of_split: Predictions, row: Mapping[str, Any]) -> None:
    label, predicted = row["label"], row["predicted"]
    if not (isinstance(label, str) and isinstance(predicted, str)):
        raise TypeError(label)
    of_split.rows.append((row["id"], label))
    of_split.labels.append(label)
    of_split.predicted.append(predicted)
    of_split.languages.append(row["language"])
