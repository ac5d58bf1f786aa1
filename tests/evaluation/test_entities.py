"""Entities are right or wrong as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from indictune.evaluation.entities import entity_metrics

TAGS = ["B-LOC", "B-PER", "I-PER", "O"]
_ = -100  # a token that carries no tag


def all_read(tags: list[list[int]]) -> list[list[bool]]:
    return [[True] * len(row) for row in tags]


def test_half_an_entity_is_a_wrong_one() -> None:
    right = [[1, 2, 3, 0], [0, 3]]
    predicted = np.array([[_, 1, 3, 3, 0, _], [0, 3, _, _, _, _]])  # PER is cut, both LOC are found
    found = entity_metrics(predicted, np.array([3.0, 3.0]), right, all_read(right), ["hi", "ta"], TAGS)
    assert (found["num_examples"], found["num_tags"], found["loss"]) == (2, 6, 1.0)
    assert (found["precision"], found["recall"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found["per_language"]["ta"] == {"num_examples": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    assert found["per_language"]["hi"]["f1"] == pytest.approx(0.5)
    assert found["per_entity"]["LOC"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2}
    assert found["per_entity"]["PER"]["f1"] == 0.0


def test_no_entity_at_all_scores_nothing() -> None:
    found = entity_metrics(np.array([[3]]), np.array([0.5]), [[3]], [[True]], ["hi"], TAGS)
    assert (found["f1"], found["per_entity"], found["loss"]) == (0.0, {}, 0.5)


def test_a_word_that_the_model_does_not_read_is_a_missed_entity() -> None:
    right = [[0, 3, 1, 2], [1, 3]]
    predicted = np.array([[_, 0, 3], [_, 3, _]])  # the first sentence loses its end, the second its first word
    is_read = [[True, True, False, False], [False, True]]
    found = entity_metrics(predicted, np.array([3.0, 3.0]), right, is_read, ["hi", "hi"], TAGS)
    assert (found["precision"], found["recall"], found["f1"]) == (1.0, pytest.approx(1 / 3), 0.5)
    assert found["per_entity"]["PER"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 2}
    assert (found["num_tags"], found["loss"]) == (3, 2.0)


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        (["PER", "PER", "O", "person-actor", "NONE"], {"PER": 1, "person-actor": 1, "NONE": 1}),
        (["U-PER", "U-PER", "B-LOC", "I-LOC", "L-LOC"], {"PER": 2, "LOC": 1}),
        (["S-PER", "S-PER", "B-LOC", "E-LOC", "I-LOC"], {"PER": 2, "LOC": 2}),
    ],
)
def test_every_way_of_writing_tags_counts_whole_entities(tags: list[str], entities: dict[str, int]) -> None:
    ids = [list(range(len(tags)))]
    found = entity_metrics(np.array(ids), np.array([0.0]), ids, all_read(ids), ["hi"], tags)
    assert {kind: scores["support"] for kind, scores in found["per_entity"].items()} == entities
    assert found["f1"] == 1.0
