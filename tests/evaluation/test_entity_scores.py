"""Entities are right or wrong as a whole, as seqeval counts them."""

from __future__ import annotations

import numpy as np
import pytest
from seqeval.metrics import classification_report, f1_score, precision_score, recall_score

from indictune.evaluation.scorers import entities, entity_kinds

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def test_entities_agree_with_seqeval() -> None:
    references, predictions = np.random.default_rng(1).choice(5, (2, 60, 6), p=[0.4, 0.2, 0.1, 0.2, 0.1])
    predictions[::3] = references[::3]
    group = entities(predictions, references.tolist(), np.ones((60, 6), bool).tolist(), TAGS)(np.arange(60))
    right, found = ([[TAGS[tag] for tag in row] for row in each] for each in (references, predictions))
    for name, score in (("f1", f1_score), ("precision", precision_score), ("recall", recall_score)):
        assert group.scores[name].value == pytest.approx(score(right, found), rel=1e-15)
    for kind, scores in classification_report(right, found, output_dict=True).items():
        if not kind.endswith(" avg"):
            each = group.per_label[kind]
            ours = each.precision.value, each.recall.value, each.f1.value, each.support
            assert ours == pytest.approx(tuple(scores.values()), rel=1e-15)
    assert group.counts == {"num_tags": 360}


def test_a_word_that_the_model_does_not_read_is_a_missed_entity() -> None:
    references = [[1, 2, 0], [3, 0, 3], [0, 0, 0]]
    predictions = np.array([[-100, 1, 2], [3, 3, 0], [0, 1, -100]])  # the first token of the first row has no tag
    group = entities(predictions, references, [[True, True, False], [True] * 3, [True, True, False]], TAGS)
    found = group(np.arange(3))
    assert {kind: each.support for kind, each in found.per_label.items()} == {"LOC": 2, "PER": 1}
    assert found.per_label["LOC"].recall.value == 0.5
    assert found.per_label["PER"].precision.value == 0.5
    assert found.counts == {"num_tags": 7}
    assert group(np.array([2])).counts == {"num_tags": 2}


@pytest.mark.parametrize(
    ("tags", "counts"),
    [
        (["PER", "PER", "O", "person-actor", "NONE"], {"PER": 1, "person-actor": 1, "NONE": 1}),
        (["U-PER", "U-PER", "B-LOC", "I-LOC", "L-LOC"], {"PER": 2, "LOC": 1}),
        (["S-PER", "S-PER", "B-LOC", "E-LOC", "I-LOC"], {"PER": 2, "LOC": 2}),
    ],
)
def test_every_way_of_writing_tags_counts_whole_entities(tags: list[str], counts: dict[str, int]) -> None:
    ids = [list(range(len(tags)))]
    found = entities(np.array(ids), ids, [[True] * len(tags)], tags)(np.arange(1))
    assert {kind: scores.support for kind, scores in found.per_label.items()} == counts
    assert found.scores["f1"].value == 1.0
    assert entity_kinds(tags) == sorted(counts)
