"""Metrics as plain-text tables for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indictune.console_text import table


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
    return table(["language", "examples", "accuracy", "macro-F1"], languages, footer=line("all", metrics))


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
    return table(["label", "precision", "recall", "F1", "support"], labels)


def answers_table(metrics: Mapping[str, Any]) -> str:
    """Lay out examples, tokens, loss, perplexity and accuracy, a line for each language and a last one for all.

    Args:
        metrics: the `eval` or `test` block of `metrics.json`, as `answer_metrics.answer_metrics` returns it.

    Returns:
        Lines of equal display width, without a line break at the end.
    """

    def line(name: str, row: Mapping[str, Any]) -> list[str]:
        counts = [f"{row[count]:,}" for count in ("num_examples", "num_tokens")]
        return [name, *counts, *(f"{row[score]:.4f}" for score in ("loss", "perplexity", "answer_token_accuracy"))]

    languages = [line(language, row) for language, row in metrics["per_language"].items()]
    header = ["language", "examples", "tokens", "loss", "perplexity", "token accuracy"]
    return table(header, languages, footer=line("all", metrics))


def scores_table(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    """Lay out examples and some scores, a line for each language and a last one for all rows together.

    Args:
        metrics: a block of `metrics.json` with `per_language`.
        names: of the scores.

    Returns:
        Lines of equal display width, without a line break at the end.
    """

    def line(name: str, row: Mapping[str, Any]) -> list[str]:
        return [name, f"{row['num_examples']:,}", *(f"{row[score]:.4f}" for score in names)]

    languages = [line(language, row) for language, row in metrics["per_language"].items()]
    return table(["language", "examples", *names], languages, footer=line("all", metrics))
