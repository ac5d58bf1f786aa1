"""How much a row of each label counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight

from indictune.data.class_weights import as_tensor, class_weights
from indictune.errors import UserError

LABELS = ["negative", "neutral", "positive"]


def write(tmp_path: Path, content: str, name: str = "w.yaml") -> str:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return str(tmp_path / name)


def in_order(choice: str | None, train_labels: list[str], labels: list[str]) -> torch.Tensor | None:
    return as_tensor(class_weights(choice, train_labels, labels), labels)


def problems(choice: str, labels: list[str] = LABELS) -> list[str]:
    with pytest.raises(UserError) as raised:
        class_weights(choice, labels, labels)
    return raised.value.problems


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


def test_a_missing_file_is_told_with_what_may_be_given(tmp_path: Path) -> None:
    (problem,) = problems("weigths.yaml")
    assert problem.startswith("--class_weights weigths.yaml: cannot be read: ")
    assert problem.endswith("Expected `balanced` or a JSON or YAML file of label: weight.")


@pytest.mark.parametrize("content", ["{", "a: [1", "a: 1: 2"])
def test_a_broken_file_is_told(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    (problem,) = problems(path)
    assert problem.startswith(f"--class_weights {path}: cannot be read: ")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("negative: 1\nnegative: 5\n", "cannot be read: negative stands there twice (line 2, column 1). "),
        ('{"a": 1, "a": 5}', "cannot be read: a stands there twice (line 1, column 10). "),
        ("1: 1\n1.0: 5\n2: 1\n", "label 1 has 2 weights, in different spellings."),
    ],
)
def test_a_label_has_one_weight(tmp_path: Path, content: str, told: str) -> None:
    path = write(tmp_path, content)
    (problem,) = problems(path, ["1", "2"])
    assert problem.startswith(f"--class_weights {path}: {told}")


def test_a_file_without_labels_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "[1, 2, 3]")
    assert problems(path) == [f"--class_weights {path}: expected label: weight, found list."]


def test_missing_and_unknown_labels_are_told_together(tmp_path: Path) -> None:
    path = write(tmp_path, "positive: 1\nPositive: 2\nneutral: 1\n")
    assert problems(path) == [
        f"--class_weights {path}: label negative has no weight.",
        f"--class_weights {path}: Positive is no label of the training rows (negative, neutral, positive).",
    ]


@pytest.mark.parametrize("weight", ["0", "-1", "high", "true", ".inf", "inf", ".nan", "nan", "[1]", ""])
def test_a_weight_is_a_number_above_0(tmp_path: Path, weight: str) -> None:
    path = write(tmp_path, f"negative: {weight}\nneutral: 1\npositive: 1\n")
    (problem,) = problems(path)
    assert problem.startswith(f"--class_weights {path}: negative: ")
    assert problem.endswith(": expected a number above 0.")
