"""Entities are right or wrong as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from indictune.evaluation.entities import entity_metrics

TAGS = ["B-LOC", "B-PER", "I-PER", "O"]
_ = -100  # a token that carries no tag


def test_half_an_entity_is_a_wrong_one() -> None:
    right = [[_, 1, 2, 3, 0, _], [0, 3, _, _, _, _]]
    predicted = np.array([[_, 1, 3, 3, 0, _], [0, 3, _, _, _, _]])  # PER is cut, both LOC are found
    found = entity_metrics(predicted, np.array([3.0, 3.0]), right, ["hi", "ta"], TAGS)
    assert (found["num_examples"], found["num_tags"], found["loss"]) == (2, 6, 1.0)
    assert (found["precision"], found["recall"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found["per_language"]["ta"] == {"num_examples": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    assert found["per_language"]["hi"]["f1"] == pytest.approx(0.5)
    assert found["per_entity"]["LOC"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2}
    assert found["per_entity"]["PER"]["f1"] == 0.0


def test_no_entity_at_all_scores_nothing() -> None:
    found = entity_metrics(np.array([[3]]), np.array([0.5]), [[3]], ["hi"], TAGS)
    assert (found["f1"], found["per_entity"], found["loss"]) == (0.0, {}, 0.5)
