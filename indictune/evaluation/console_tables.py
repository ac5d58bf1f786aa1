"""Metrics as plain-text tables for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indictune.console_text import table
from indictune.evaluation.breakdown import Breakdown, Group


def scores_table(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    """Lay out examples and some scores, a line for each language and a last one for all rows together.

    Args:
        metrics: a block of `metrics.json` with `per_language`.
        names: of the scores.
    """

    def line(language: str, row: Mapping[str, Any]) -> list[str]:
        return [language, *(_cell(row[name]) for name in ("num_examples", *names))]

    languages = [line(language, row) for language, row in metrics["per_language"].items()]
    return table(["language", "examples", *names], languages, footer=line("all", metrics))


def per_label_table(metrics: Mapping[str, Any]) -> str:
    """Lay out precision, recall, F1 and support, a line for each label of the model.

    Args:
        metrics: a block of `metrics.json` with `per_label`.
    """
    names = ("precision", "recall", "f1", "support")
    labels = [[label, *(_cell(row[name]) for name in names)] for label, row in metrics["per_label"].items()]
    return table(["label", *names], labels)


def in_sentences(breakdown: Breakdown) -> str:
    """The main score with its interval, of all rows and of the worst language, and the calibration."""

    def shown(group: Group) -> str:
        score = group.scores[breakdown.score]
        return f"{score.value:.4f}, 95% interval {score.low:.4f} to {score.high:.4f}"

    lines = [f"{breakdown.score}: {shown(breakdown.overall)}"]
    if len(breakdown.by["language"]) > 1:
        worst = breakdown.worst_language
        lines.append(f"worst language, {worst}: {shown(breakdown.by['language'][worst])}")
    for what in ("script", "length"):
        groups = breakdown.by.get(what, {})
        if len(groups) > 1:
            values = (f"{name} {group.scores[breakdown.score].value:.4f}" for name, group in groups.items())
            lines.append(f"by {what}: {', '.join(values)}")
    if (sure := breakdown.calibration) is not None:
        after = (
            "" if sure.temperature is None else f"; {sure.calibrated_ece:.4f} at temperature {sure.temperature:.2f}"
        )
        lines.append(f"calibration error: {sure.ece:.4f}{after}")
    if (written := breakdown.written) is not None:
        same = written.overall.scores["exact_match"].value
        lines.append(f"answers written by the model: {written.overall.num_examples:,}, exact match {same:.4f}")
        lines.append(in_sentences(written))
    return "\n".join(lines)


def _cell(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
