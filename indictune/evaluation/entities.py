"""Metrics of tagged sentences: whole entities are right or wrong, as seqeval counts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

from indictune.evaluation.metrics import rows_of_languages

_IGNORED = -100


def entity_metrics(
    predictions: np.ndarray,
    losses: np.ndarray,
    references: Sequence[Sequence[int]],
    languages: Sequence[str],
    tag_names: Sequence[str],
) -> dict[str, Any]:
    """Score the tags of sentences, overall, per language and per kind of entity.

    Args:
        predictions: int [sentences, tokens]; -100 where a token carries no tag.
        losses: summed loss of each sentence, float [sentences].
        references: of each sentence, one number a token; -100 where it carries no tag.
        languages: of each sentence.
        tag_names: in the order of the numbers.

    Returns:
        `num_examples`, `num_tags`, `loss` (mean over tags), `precision`, `recall`, `f1`, and `per_language.<language>`
        and `per_entity.<kind>` with the same scores.
    """
    right = [[tag_names[tag] for tag in row if tag != _IGNORED] for row in references]
    predicted = [[tag_names[int(tag)] for tag in row if tag != _IGNORED] for row in predictions]
    num_tags = sum(map(len, right))
    report = classification_report(right, predicted, output_dict=True, zero_division=0)
    return {
        "num_examples": len(right),
        "num_tags": num_tags,
        "loss": math.fsum(np.asarray(losses, np.float64).tolist()) / max(1, num_tags),
        **_scores(right, predicted),
        "per_language": {
            language: {"num_examples": int(rows.sum()), **_scores(_chosen(right, rows), _chosen(predicted, rows))}
            for language, rows in rows_of_languages(languages).items()
        },
        "per_entity": {
            kind: {
                "precision": float(row["precision"]),
                "recall": float(row["recall"]),
                "f1": float(row["f1-score"]),
                "support": int(row["support"]),
            }
            for kind, row in report.items()
            if not kind.endswith(" avg")
        },
    }


def _chosen(sentences: Sequence[list[str]], rows: np.ndarray) -> list[list[str]]:
    return [sentence for sentence, is_chosen in zip(sentences, rows, strict=True) if is_chosen]


def _scores(right: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    return {
        "precision": float(precision_score(right, predicted, zero_division=0)),
        "recall": float(recall_score(right, predicted, zero_division=0)),
        "f1": float(f1_score(right, predicted, zero_division=0)),
    }
