"""Metrics of a language model on given answers: loss, perplexity and answer-token accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Of each row: summed loss, number of tokens that count, number of correct predictions.
RowResults = tuple[np.ndarray, np.ndarray, np.ndarray]


def answer_metrics(results: RowResults, languages: Sequence[str]) -> dict[str, Any]:
    """Metrics over all tokens that count, together and by language.

    Tokens are summed before anything is divided. So a long answer counts by its length, and the numbers do not depend
    on how rows were put into batches.

    Args:
        results: summed cross-entropy in nats, number of tokens and number of tokens predicted right, each [rows].
        languages: of each row.

    Returns:
        `num_examples`, `num_tokens`, `loss` (nats a token), `perplexity` (its exponential), `answer_token_accuracy`,
        and the same for each language under `per_language`.
    """
    by_language = {language: np.array([each == language for each in languages]) for language in sorted(set(languages))}
    return {
        **_block(results),
        "per_language": {
            language: _block(tuple(values[rows] for values in results)) for language, rows in by_language.items()
        },
    }


def flatten_answers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars that the Trainer logs, and by which it compares checkpoints."""
    return {name: metrics[name] for name in ("loss", "perplexity", "answer_token_accuracy")}


def _block(results: tuple[np.ndarray, ...]) -> dict[str, Any]:
    losses, tokens, right = (values.astype(np.float64) for values in results)
    count = tokens.sum()
    loss = float(losses.sum() / count) if count else math.nan
    with np.errstate(over="ignore"):  # infinite where Python's own exp would fail
        perplexity = float(np.exp(loss))
    return {
        "num_examples": len(losses),
        "num_tokens": int(count),
        "loss": loss,
        "perplexity": perplexity,
        "answer_token_accuracy": float(right.sum() / count) if count else math.nan,
    }
