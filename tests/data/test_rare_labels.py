"""Labels of few rows are named with their first row, and likely typing errors with what was meant."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from indictune.data.cache import StoredRows
from indictune.data.health.findings import rare_labels


def rows_of(labels: Sequence[str]) -> StoredRows:
    return StoredRows(pa.table({"label": labels, "line": range(2, len(labels) + 2)}), "t.csv", "--train_file")


def test_a_typing_error_is_named_with_its_line_and_the_label_that_was_meant() -> None:
    (note,) = rare_labels(rows_of(["yes"] * 300 + ["n"] + ["no"] * 299), None)
    assert [part in note for part in ("1 of 600 rows", "label n", "t.csv:302", "no (299 rows)")] == [True] * 4
    (note,) = rare_labels(rows_of(["yes"] * 300 + ["x"] + ["no"] * 299), None)
    assert "label x" in note
    assert "299" not in note


@pytest.mark.parametrize(
    ("counts", "rare"),
    [
        ({"a": 100, "b": 19}, ["b"]),
        ({"a": 100, "b": 20}, []),
        ({"a": 9_900, "b": 49}, ["b"]),
        ({"a": 9_900, "b": 50}, []),
        ({"a": 19, "b": 3}, []),  # a small set
        ({"a": 20, "b": 3}, ["b"]),
    ],
)
def test_a_label_is_rare_below_20_rows_or_half_a_percent(counts: dict[str, int], rare: list[str]) -> None:
    notes = rare_labels(rows_of([label for label, count in counts.items() for _ in range(count)]), None)
    assert [f"label {label}" in note for label, note in zip(rare, notes, strict=True)] == [True] * len(rare)


def test_many_rare_labels_are_counted() -> None:
    notes = rare_labels(rows_of(["a"] * 100 + [f"rare {number}" for number in range(9)]), None)
    assert len(notes) == 6
    assert "4 more" in notes[-1]


def test_several_labels_of_a_row_count_each_and_scores_do_not() -> None:
    labels = ["joy|anger"] * 30 + ["joy|angr"]
    (note,) = rare_labels(rows_of(labels), "multi_label_classification")
    assert ["label angr," in note, "t.csv:32" in note, "anger (30 rows)" in note] == [True] * 3
    assert rare_labels(rows_of(["1"] * 30 + ["2"]), "regression") == []
