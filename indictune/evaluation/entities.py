"""Metrics of tagged sentences: whole entities are right or wrong, as seqeval counts them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from indictune.evaluation.metrics import label_scores, scores_by_language
from indictune.evaluation.sums import Scored, entities

_IGNORED = -100


def entity_metrics(
    predictions: np.ndarray,
    losses: np.ndarray,
    references: Sequence[Sequence[int]],
    are_read: Sequence[Sequence[bool]],
    languages: Sequence[str],
    tag_names: Sequence[str],
) -> dict[str, Any]:
    """Score the tags of sentences.

    Args:
        predictions: int [sentences, tokens]; -100 where a token carries no tag.
        losses: summed loss of each sentence, float [sentences].
        references: of each sentence, the tag of each word.
        are_read: of each sentence, whether the model reads each word. A word that was cut off counts as predicted O.
        languages: of each sentence.
        tag_names: in the order of the numbers.

    Returns:
        `scores_by_language` with `precision`, `recall` and `f1`, its loss a mean over the words that are read;
        `num_tags`, the number of these words; and `per_entity.<kind>` with the same scores and `support`.
    """
    from seqeval.metrics import classification_report, f1_score, precision_score, recall_score  # slow to import

    names = list(map(_seqeval_tag, tag_names))
    right = [[names[tag] for tag in row] for row in references]
    predicted = predicted_tags(predictions, are_read, names)

    def score(rows: np.ndarray) -> dict[str, float]:
        chosen = list(compress(right, rows)), list(compress(predicted, rows))
        scores = {"precision": precision_score, "recall": recall_score, "f1": f1_score}
        return {name: float(each(*chosen, zero_division=0)) for name, each in scores.items()}

    num_tags = sum(map(sum, are_read))
    report = classification_report(right, predicted, output_dict=True, zero_division=0)
    kinds = [kind for kind in report if not kind.endswith(" avg")]
    columns = [[report[kind][name] for kind in kinds] for name in ("precision", "recall", "f1-score", "support")]
    block = scores_by_language(score, losses, languages, max(1, num_tags))
    return block | {"num_tags": num_tags, "per_entity": label_scores(columns, kinds)}


def predicted_tags(
    predictions: np.ndarray, are_read: Sequence[Sequence[bool]], names: Sequence[str]
) -> list[list[str]]:
    """The predicted tag of each word, O for one that was cut off; arguments as of `entity_metrics`."""
    tags = []
    for row, is_read in zip(predictions, are_read, strict=True):
        found = iter(row[row != _IGNORED])
        tags.append([names[next(found)] if each else "O" for each in is_read])
    return tags


def entity_scores(
    predictions: np.ndarray,
    references: Sequence[Sequence[int]],
    are_read: Sequence[Sequence[bool]],
    tag_names: Sequence[str],
) -> Scored:
    """Scores the entities of some sentences with intervals; arguments as of `entity_metrics`."""
    names = list(map(_seqeval_tag, tag_names))
    predicted = [_entities(row) for row in predicted_tags(predictions, are_read, names)]
    right = [_entities([names[tag] for tag in row]) for row in references]
    kinds = entity_kinds(tag_names)
    hits = [found & given for found, given in zip(predicted, right, strict=True)]
    present, given, both = (_counted(each, kinds) for each in (right, predicted, hits))
    return entities(present, given, both, kinds)


def entity_kinds(tag_names: Sequence[str]) -> list[str]:
    """The kinds of entity that these tags can name, sorted."""
    return sorted({kind for tag in tag_names for kind, *_ in _entities([_seqeval_tag(tag)])})


def _entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Kind, first and last word of each entity of a sentence."""
    from seqeval.metrics.sequence_labeling import get_entities  # slow to import

    return set(get_entities(tags))


def _counted(rows: Sequence[set[tuple[str, int, int]]], kinds: Sequence[str]) -> np.ndarray:
    """How many entities of each kind a sentence has, int64 [sentences, kinds]."""
    number = {kind: at for at, kind in enumerate(kinds)}
    counts = np.zeros((len(rows), len(kinds)), np.int64)
    for row, found in zip(counts, rows, strict=True):
        for kind, *_ in found:
            row[number[kind]] += 1
    return counts


def _seqeval_tag(tag: str) -> str:
    """The tag as seqeval reads it: L- and U- (BILOU) become E- and S-, and a tag without a prefix is an I-."""
    prefix, dash, kind = tag.partition("-")
    prefix = {"L": "E", "U": "S"}.get(prefix, prefix)
    return f"{prefix}{dash}{kind}" if prefix in ("O", "B", "I", "E", "S") else f"I-{tag}"
