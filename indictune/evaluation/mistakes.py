"""The rows that a model gets most wrong, with their texts: the content of `mistakes.json`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indictune.files import json_or_nothing

MISTAKES = "mistakes.json"
_OF_A_LANGUAGE = 5
_OF_A_SPLIT = 100
_CHARACTERS = 600  # of a text


class Mistakes:
    """Collects the worst rows of each split and language. Memory does not grow with the rows."""

    def __init__(self) -> None:
        self._worst: dict[tuple[str, str], list[tuple[float, int, dict[str, Any]]]] = {}

    def add(self, row: Mapping[str, Any], text: str) -> None:
        """Look at a row of `predictions.jsonl` and at its text."""
        wrong = wrongness(row)
        if not 0 < wrong < math.inf:
            return
        worst = self._worst.setdefault((row["split"], row["language"]), [])
        if len(worst) == _OF_A_LANGUAGE and wrong <= worst[0][0]:
            return
        kept = {name: value for name, value in row.items() if name not in ("id", "scores")}
        entry = wrong, -row["number"], kept | {"wrongness": wrong, "text": text[:_CHARACTERS]}
        (heapq.heappushpop if len(worst) == _OF_A_LANGUAGE else heapq.heappush)(worst, entry)

    def by_split(self) -> dict[str, list[dict[str, Any]]]:
        """The worst rows of each split, the worst first."""
        found: dict[str, list[tuple[float, int, dict[str, Any]]]] = {}
        for (split, _), worst in self._worst.items():
            found.setdefault(split, []).extend(worst)
        return {split: [each[2] for each in heapq.nlargest(_OF_A_SPLIT, rows)] for split, rows in found.items()}


def wrongness(row: Mapping[str, Any]) -> float:
    """How wrong a row of `predictions.jsonl` is; 0 if it is right.

    It is the probability of the wrong label, of one label or several; the distance of numbers; the number of wrong
    tags; or the loss of a language model.
    """
    if "loss" in row:
        return float(row["loss"])
    label, predicted = row["label"], row["predicted"]
    if label == predicted:
        return 0.0
    if isinstance(label, str):
        return float(row["scores"][predicted])
    if not isinstance(label, list):
        return abs(float(label) - float(predicted))
    if "scores" not in row:
        return float(sum(a != b for a, b in zip(label, predicted, strict=True)))
    scores = {name: row["scores"][name] for name in {*label} ^ {*predicted}}
    return float(max(score if name in predicted else 1 - score for name, score in scores.items()))


def read_mistakes(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The worst rows in the folder of a run or an evaluation, by split; empty if it has none."""
    return json_or_nothing(folder / MISTAKES)
