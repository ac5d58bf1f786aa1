"""Precision, recall and F1 of entities in tagged sentences, which are right or wrong as a whole, as seqeval counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from indictune.evaluation.breakdown import Group, Scorer
from indictune.evaluation.intervals import RESAMPLES
from indictune.evaluation.label_scores import group_of_counts

_IGNORED = -100


def entities(
    predictions: np.ndarray,
    references: Sequence[Sequence[int]],
    are_read: Sequence[Sequence[bool]],
    tag_names: Sequence[str],
) -> Scorer:
    """Scores the tags of sentences: F1, precision, recall, and those of each kind of entity.

    `num_tags` is the number of words that the model reads.

    Args:
        predictions: int [sentences, tokens]; -100 where a token carries no tag.
        references: of each sentence, the tag of each word.
        are_read: of each sentence, whether the model reads each word. A word that was cut off counts as predicted O.
        tag_names: in the order of the numbers.
    """
    names = list(map(_seqeval_tag, tag_names))
    predicted = [_entities(row) for row in predicted_tags(predictions, are_read, names)]
    right = [_entities([names[tag] for tag in row]) for row in references]
    kinds = entity_kinds(tag_names)
    hits = [found & given for found, given in zip(predicted, right, strict=True)]
    counts = [_counted(each, kinds) for each in (right, predicted, hits)]
    num_tags = np.array(list(map(sum, are_read)))

    def group(rows: np.ndarray, draws: int = RESAMPLES) -> Group:
        present, given, both = (each[rows] for each in counts)
        scored = group_of_counts(present, given, both, kinds, ("f1", None), draws)
        return replace(scored, counts={"num_tags": int(num_tags[rows].sum())})

    return group


def predicted_tags(
    predictions: np.ndarray, are_read: Sequence[Sequence[bool]], names: Sequence[str]
) -> list[list[str]]:
    """The predicted tag of each word, O for one that was cut off; arguments as of `entities`."""
    tags = []
    for row, is_read in zip(predictions, are_read, strict=True):
        found = iter(row[row != _IGNORED])
        tags.append([names[next(found)] if each else "O" for each in is_read])
    return tags


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
