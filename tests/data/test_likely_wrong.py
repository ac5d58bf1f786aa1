"""Labels that are likely wrong, by confident learning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from indictune.data.health.likely_wrong import (
    confidently_wrong,
    read_out_of_fold,
    wrong_labels,
)
from indictune.files import json_line
from tests.refusals import refused

# The thresholds are the means of 0.9, 0.7, 0.2 (= 0.6) and of 0.8, 0.6, 0.1 (= 0.5).
PROBABILITIES = np.array([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8], [0.2, 0.8], [0.4, 0.6], [0.9, 0.1]])
LABELS = np.array([0, 0, 0, 1, 1, 1])


def test_rows_off_the_diagonal_of_the_confident_joint_are_ranked_by_margin() -> None:
    found = confidently_wrong(LABELS, PROBABILITIES)
    assert [(row, likely) for row, likely, _ in found] == [(5, 0), (2, 1)]
    assert [margin for *_, margin in found] == pytest.approx([0.8, 0.6])


def test_a_row_below_all_thresholds_counts_nowhere() -> None:
    found = confidently_wrong(np.array([0, 0, 1, 1]), np.array([[0.9, 0.1], [0.45, 0.55], [0.4, 0.6], [0.1, 0.9]]))
    assert found == []  # 0.55 is below the threshold of 0.75


def test_a_label_that_no_row_has_is_never_likely() -> None:
    assert confidently_wrong(np.array([0, 0]), np.array([[0.2, 0.8], [0.9, 0.1]])) == []


def test_flipped_labels_are_found() -> None:
    draw = np.random.default_rng(0)
    right = draw.integers(0, 3, 2_000)
    given = right.copy()
    flipped = draw.choice(2_000, 100, replace=False)
    given[flipped] = (right[flipped] + draw.integers(1, 3, 100)) % 3
    logits = draw.normal(size=(2_000, 3)) + 4 * np.eye(3)[right]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    first = {row for row, *_ in confidently_wrong(given, probabilities)[:100]}
    assert len(first & set(flipped.tolist())) >= 70


def folded(number: int, text: str, label: str, score: float) -> dict[str, object]:
    """A row as a sweep writes it."""
    about = {"row": f"t.csv:{number}", "text": text, "language": "hi", "label": label}
    return {**about, "scores": {"pos": score, "neg": 1 - score}}


ROWS = [folded(at + 2, f"text {at}", "pos" if at < 4 else "neg", 0.9 if at < 3 else 0.1) for at in range(8)]


def test_rows_are_listed_with_place_and_text_and_counted_by_language_and_label() -> None:
    found = wrong_labels(ROWS)
    (row,) = found.rows
    assert row == {**row, "row": "t.csv:5", "label": "pos", "likely": "neg", "text": "text 3"}
    assert row["margin"] == pytest.approx(0.8)
    assert found.counts == [["hi", "neg", "4", "0", "0.0%"], ["hi", "pos", "4", "1", "25.0%"]]
    assert "1 of 8 rows, by models that agree with 88%" in found.summary
    assert "t.csv:5: pos, likely neg" in str(found)


def test_a_folder_without_folds_or_with_damage_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out_of_fold.jsonl"
    with refused("no-out-of-fold", flag="--from_folds"):
        read_out_of_fold(file)
    row = folded(2, "one\u2028line", "pos", 0.9)
    file.write_text(json_line(row), encoding="utf-8")
    assert read_out_of_fold(file) == [row]
    for damaged in ("", "{", "[]", json.dumps({"row": "t.csv:2"})):
        file.write_text(damaged, encoding="utf-8")
        with refused("unreadable"):
            read_out_of_fold(file)
