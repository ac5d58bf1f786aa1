"""The worst rows: how wrong a row of each task is, and which are kept."""

from __future__ import annotations

from typing import Any

import pytest

from indictune.evaluation.breakdown import Mistakes, wrongness


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"label": "a", "predicted": "a", "scores": {"a": 0.9}}, 0),
        ({"label": "a", "predicted": "b", "scores": {"a": 0.2, "b": 0.7}}, 0.7),
        ({"label": 1.0, "predicted": -0.5}, 1.5),
        ({"label": ["a"], "predicted": ["a"], "scores": {"a": 0.9, "b": 0.1}}, 0),
        ({"label": ["a"], "predicted": ["b"], "scores": {"a": 0.2, "b": 0.6}}, 0.8),  # `a` is missing by 0.8
        ({"label": ["O", "B-PER", "O"], "predicted": ["O", "O", "B-LOC"]}, 2),
        ({"loss": 2.5, "num_tokens": 3, "num_right": 1}, 2.5),
    ],
)
def test_how_wrong_a_row_is(row: dict[str, Any], wrong: float) -> None:
    assert wrongness(row) == pytest.approx(wrong)


def row(number: int, sure: float, language: str = "hi", split: str = "test") -> dict[str, Any]:
    scores = {"a": 1 - sure, "b": sure}
    return {
        "split": split,
        "number": number,
        "language": language,
        "id": "x",
        "label": "a",
        "predicted": "b",
        "scores": scores,
    }


def test_the_worst_rows_of_each_language_and_split_are_kept() -> None:
    mistakes = Mistakes()
    for number in range(20):
        mistakes.add(row(number, 0.5 + number / 100), f"text {number}")
    mistakes.add(row(3, 0.51, "ta"), "x" * 5000)
    mistakes.add(row(4, 0.9, split="eval"), "")
    mistakes.add(row(5, 0.99) | {"predicted": "a"}, "right")
    mistakes.add({"split": "test", "number": 6, "language": "hi", "loss": float("nan")}, "")
    kept = mistakes.by_split()
    assert [each["number"] for each in kept["test"]] == [19, 18, 17, 16, 15, 3]
    assert [each["number"] for each in kept["eval"]] == [4]
    assert kept["test"][0]["text"] == "text 19"
    assert len(kept["test"][-1]["text"]) == 600
    mistakes.add(row(8, 0.9, split="eval"), "x" * 5000, "second")
    assert mistakes.by_split()["eval"][1]["text"] == "x" * 300 + "\nsecond"


def test_of_equal_rows_the_first_are_kept() -> None:
    mistakes = Mistakes()
    for number in range(9):
        mistakes.add(row(number, 0.75), "")
    assert [each["number"] for each in mistakes.by_split()["test"]] == [0, 1, 2, 3, 4]
