"""How much a row of each label counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from indictune.data.labels import as_tensor, class_weights
from indictune.errors import UserError
from tests.refusals import refused

LABELS = ["negative", "neutral", "positive"]


def write(tmp_path: Path, content: str, name: str = "w.yaml") -> str:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return str(tmp_path / name)


def in_order(choice: str | None, train_labels: list[str], labels: list[str]) -> torch.Tensor | None:
    return as_tensor(class_weights(choice, Counter(train_labels), labels), labels)


def test_without_a_choice_all_labels_count_alike() -> None:
    assert in_order(None, LABELS, LABELS) is None


def test_balanced_weighs_a_label_by_how_rare_it_is() -> None:
    train = ["positive"] * 6 + ["neutral"] * 2 + ["negative"]
    weights = in_order("balanced", train, LABELS)
    assert weights is not None
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([9 / (3 * 1), 9 / (3 * 2), 9 / (3 * 6)])
    reference = compute_class_weight("balanced", classes=np.array(LABELS), y=np.array(train))
    assert weights.tolist() == pytest.approx(list(reference))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.json", '{"positive": 1, "negative": 2.5, "neutral": 1e-1}'),
        ("w.yaml", "positive: 1\nnegative: 2.5\nneutral: 1e-1\n"),
    ],
)
def test_a_file_gives_the_weights_in_the_order_of_the_labels(tmp_path: Path, name: str, content: str) -> None:
    weights = in_order(write(tmp_path, content, name), [], LABELS)
    assert weights is not None
    assert weights.tolist() == pytest.approx([2.5, 0.1, 1.0])


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        ("0: 1.5\n1: 3\n", ["0", "1"]),
        ("1.0: 3\n0.0: 1.5\n", ["0", "1"]),
        ("no: 1.5\nyes: 3\n", ["no", "yes"]),
        ("false: 1.5\ntrue: 3\n", ["false", "true"]),
        ("False: 1.5\nTrue: 3\n", ["false", "true"]),
        ("बुरा: 1.5\nअच्छा: 3\n", ["बुरा", "अच्छा"]),
    ],
)
def test_labels_are_spelt_as_in_the_data(tmp_path: Path, content: str, labels: list[str]) -> None:
    weights = in_order(write(tmp_path, content), [], labels)
    assert weights is not None
    assert weights.tolist() == [1.5, 3.0]


def test_a_missing_file_is_refused() -> None:
    with refused("class-weights-unreadable", "weigths.yaml", flag="--class_weights"):
        class_weights("weigths.yaml", {}, LABELS)


@pytest.mark.parametrize("content", ["{", "a: [1", "a: 1: 2", "[1, 2, 3]", "a: 1\na: 5\n", '{"a": 1, "a": 5}'])
def test_a_file_that_holds_no_weight_for_each_label_is_refused(tmp_path: Path, content: str) -> None:
    with refused("class-weights-unreadable", flag="--class_weights") as raised:
        class_weights(write(tmp_path, content), {}, LABELS)
    assert "\n" not in raised.value.message


def test_a_label_has_one_weight(tmp_path: Path) -> None:
    with refused("class-weight-twice", "label 1 "):
        class_weights(write(tmp_path, "1: 1\n1.0: 5\n2: 1\n"), {}, ["1", "2"])


def test_missing_and_unknown_labels_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, "positive: 1\nPositive: 2\nneutral: 1\n")
    with pytest.raises(UserError) as raised:
        class_weights(path, {}, LABELS)
    found = [(each.code, each.details["label"]) for each in raised.value.problems]
    assert found == [("class-weight-twice", "positive"), ("class-weight-missing", "negative")]


def test_a_weight_may_spell_its_label_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, "Positive: 1\nNEGATIVE: 2\nneutral: 3\n")
    assert class_weights(path, {}, LABELS) == {"positive": 1, "negative": 2, "neutral": 3}
    with refused("class-weight-unknown", "POSITIVE"):  # which of the two is it?
        class_weights(write(tmp_path, "POSITIVE: 1\npositive: 1\nPositive: 1\n"), {}, ["Positive", "positive"])


@pytest.mark.parametrize("weight", ["0", "-1", "high", "true", ".inf", "inf", ".nan", "nan", "[1]", ""])
def test_a_weight_is_a_number_above_0(tmp_path: Path, weight: str) -> None:
    with refused("class-weight-not-positive", "negative"):
        class_weights(write(tmp_path, f"negative: {weight}\nneutral: 1\npositive: 1\n"), {}, LABELS)
