"""What a report shows of a run, read from the files in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indictune.errors import UserError
from indictune.evaluation.breakdown import EVALUATION, SPLITS, Breakdown
from indictune.evaluation.mistakes import read_mistakes
from indictune.files import HEALTH, SAMPLES, json_or_nothing
from indictune.hub.card_facts import CardFacts, card_facts_of

_TRAIN_LOG = "train_log.jsonl"
_MOST_POINTS = 400  # of a curve


@dataclass(frozen=True)
class Curve:
    """A value in the course of the training: `steps` and `values`, each [points]."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class ReportedRun:
    """A run, as its report sees it.

    Attributes:
        name: of the folder, or one that tells it from other runs.
        facts: what its model card says too.
        log: of the training, a dict a logged step.
        evaluations: during the training, likewise.
        mistakes: the worst rows of each split.
        health: content of `health.json`.
        answers: that a language model wrote, each with its prompt and the right one.
    """

    name: str
    facts: CardFacts
    log: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]
    mistakes: dict[str, list[dict[str, Any]]]
    health: dict[str, Any]
    answers: Sequence[dict[str, Any]]

    @property
    def split(self) -> str:
        """The block that the report is about: `test` if there is one."""
        blocks = self.facts.breakdowns or self.facts.metrics
        return next((split for split in SPLITS if blocks.get(split)), "")

    @property
    def breakdown(self) -> Breakdown | None:
        """Scores for whom."""
        return self.facts.breakdowns.get(self.split)

    def curve(self, name: str, of: Sequence[dict[str, Any]] | None = None) -> Curve | None:
        """The curve of a value, at most 400 means of equally many logged steps; None without it."""
        rows = [(row["step"], _number(row[name])) for row in (self.log if of is None else of) if name in row]
        if not rows:
            return None
        parts = np.array_split(np.array(rows, np.float64), min(len(rows), _MOST_POINTS))
        steps, values = np.array([part.mean(0) for part in parts]).T
        return Curve(steps, values)


def read_run(folder: Path, name: str | None = None) -> ReportedRun:
    """Read a run's folder, or that of an evaluation.

    Raises:
        UserError: `report-needs-run` or `unreadable`.
    """
    try:
        facts = card_facts_of(folder, None, folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError("unreadable", "indictune report", f"{folder}: its {EVALUATION}", reason=reason) from error
    log = [row for row in _json_lines(folder / _TRAIN_LOG) if isinstance(row.get("step"), int)]
    if not (facts.metrics or facts.breakdowns or log):
        raise UserError("report-needs-run", "indictune report", folder)
    evaluations = [row for row in _history(folder) if "eval_loss" in row and "step" in row]
    mistakes, health = read_mistakes(folder), json_or_nothing(folder / HEALTH)
    answers = [row for row in _json_lines(folder / SAMPLES) if {"prompt", "reference", "answer"} <= row.keys()]
    return ReportedRun(name or folder.absolute().name, facts, log, evaluations, mistakes, health, answers)


def _history(folder: Path) -> list[dict[str, Any]]:
    """What the Trainer logged until the last checkpoint."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    numbered = {int(path.parent.name.rpartition("-")[2]): path for path in states if path.parent.name[11:].isdecimal()}
    rows = json_or_nothing(numbered[max(numbered)]).get("log_history") if numbered else []
    return [row for row in rows or [] if isinstance(row, dict)]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = list[str]()
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines:
        with suppress(ValueError):  # a killed run may have left an unfinished line
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _number(value: Any) -> float:
    with suppress(TypeError, ValueError):
        return float(value)  # NaN is a text in JSON
    return float("nan")
