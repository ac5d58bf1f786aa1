"""Metrics as plain-text tables for the console."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

COLUMN_GAP = "  "


def per_language_table(metrics: Mapping[str, Any]) -> str:
    """Lay out examples, accuracy and macro-F1, a line for each language and a last one for all rows together.

    Args:
        metrics: the `eval` or `test` block of `metrics.json`, as `metrics.classification_metrics` returns it.

    Returns:
        Lines of equal display width, without a line break at the end.
    """

    def line(name: str, row: Mapping[str, Any]) -> list[str]:
        return [name, f"{row['num_examples']:,}", f"{row['accuracy']:.4f}", f"{row['macro_f1']:.4f}"]

    languages = [line(language, row) for language, row in metrics["per_language"].items()]
    return _table(["language", "examples", "accuracy", "macro-F1"], languages, footer=line("all", metrics))


def per_label_table(metrics: Mapping[str, Any]) -> str:
    """Lay out precision, recall, F1 and support, a line for each label of the model.

    Args:
        metrics: the `eval` or `test` block of `metrics.json`, as `metrics.classification_metrics` returns it.

    Returns:
        Lines of equal display width, without a line break at the end.
    """
    labels = [
        [label, *(f"{row[score]:.4f}" for score in ("precision", "recall", "f1")), f"{row['support']:,}"]
        for label, row in metrics["per_label"].items()
    ]
    return _table(["label", "precision", "recall", "F1", "support"], labels)


def answers_table(metrics: Mapping[str, Any]) -> str:
    """Lay out examples, tokens, loss, perplexity and accuracy, a line for each language and a last one for all.

    Args:
        metrics: the `eval` or `test` block of `metrics.json`, as `answers.answer_metrics` returns it.

    Returns:
        Lines of equal display width, without a line break at the end.
    """

    def line(name: str, row: Mapping[str, Any]) -> list[str]:
        counts = [f"{row[count]:,}" for count in ("num_examples", "num_tokens")]
        return [name, *counts, *(f"{row[score]:.4f}" for score in ("loss", "perplexity", "answer_token_accuracy"))]

    languages = [line(language, row) for language, row in metrics["per_language"].items()]
    header = ["language", "examples", "tokens", "loss", "perplexity", "token accuracy"]
    return _table(header, languages, footer=line("all", metrics))


def display_width(text: str) -> int:
    """Count the terminal columns that a text takes.

    Marks that combine with the letter before them and invisible format characters take none, wide characters (East
    Asian ones and most emoji: Unicode Standard Annex 11) take two, all others one; Indic vowel signs that stand beside
    their letter (category Mc) are among the others. Emoji joined into one picture are counted one by one, as terminals
    that do not know the picture show them.
    """
    return sum(_character_width(character) for character in text)


def _character_width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _table(header: Sequence[str], body: Sequence[Sequence[str]], footer: Sequence[str] | None = None) -> str:
    """Align the first column to the left and the others, numbers, to the right; a rule sets header and footer off."""
    lines = [header, *body, *([footer] if footer else [])]
    widths = [max(map(display_width, column)) for column in zip(*lines, strict=True)]
    texts = [_aligned(line, widths) for line in lines]
    rule = "-" * display_width(texts[0])
    if footer:
        texts.insert(-1, rule)
    return "\n".join([texts[0], rule, *texts[1:]])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Pad the cells of one line to the display widths of their columns."""
    blanks = [" " * (width - display_width(cell)) for cell, width in zip(cells, widths, strict=True)]
    numbers = [blank + cell for cell, blank in zip(cells[1:], blanks[1:], strict=True)]
    return COLUMN_GAP.join([cells[0] + blanks[0], *numbers])
