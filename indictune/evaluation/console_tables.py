"""Metrics as plain-text tables for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indictune.console_text import table


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


def _cell(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
