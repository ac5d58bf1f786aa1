"""Metrics of a language model on given answers: loss, perplexity and answer-token accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from indictune.evaluation.metrics import scores_by_language

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

    def score(rows: np.ndarray) -> dict[str, float]:
        losses, tokens, right = (values[rows].astype(np.float64) for values in results)
        count = tokens.sum()
        loss = float(losses.sum() / count) if count else math.nan
        with np.errstate(over="ignore"):  # infinite where Python's own exp would fail
            perplexity = float(np.exp(loss))
        accuracy = float(right.sum() / count) if count else math.nan
        return {"num_tokens": int(count), "loss": loss, "perplexity": perplexity, "answer_token_accuracy": accuracy}

    return scores_by_language(score, results[0], languages)  # `score` gives the loss a token


def flatten_answers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The scalars that the Trainer logs, and by which it compares checkpoints."""
    return {name: metrics[name] for name in ("loss", "perplexity", "answer_token_accuracy")}
