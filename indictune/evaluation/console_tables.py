"""Scores as plain text for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indictune.console_text import table
from indictune.evaluation.breakdown import Breakdown, Group
from indictune.evaluation.score_names import RATIOS


def metrics_tables(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    """Lay out examples and some scores, a line for each language and a last one for all rows together.

    Where labels have scores, a second table has precision, recall, F1 and support of each label of the model.

    Args:
        metrics: a block of `metrics.json`.
        names: of the scores.
    """
    columns = ("num_examples", *names)
    languages = [[name, *_cells(row, columns)] for name, row in metrics["per_language"].items()]
    tables = [table(["language", "examples", *names], languages, footer=["all", *_cells(metrics, columns)])]
    if "per_label" in metrics:
        ratios = (*RATIOS, "support")
        labels = [[label, *_cells(row, ratios)] for label, row in metrics["per_label"].items()]
        tables.append(table(["label", *ratios], labels))
    return "\n\n".join(tables)


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    values = (row[name] for name in names)
    return [f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in values]


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
