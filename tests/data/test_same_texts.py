"""Texts that stand in several rows, with one label here and another there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from indictune.config.arguments import DataArguments
from indictune.data.cache import StoredRows
from indictune.data.health.findings import Finding, same_texts
from indictune.data.load_rows import load_splits

MULTI = "multi_label_classification"


def split(source: str, *rows: tuple[str, str]) -> StoredRows:
    texts, labels = zip(*rows, strict=True)
    return StoredRows(
        pa.table({"text": texts, "label": labels, "line": range(1, len(rows) + 1)}), source, f"--{source}"
    )


def contradictions(splits: dict[str, StoredRows], problem_type: str | None) -> list[Finding]:
    return [each for each in same_texts(splits, problem_type) if each.name == "conflicting_labels"]


TRAIN = split("train", ("a", "yes"), ("b", "yes"), ("a", "no"), ("c", "no"), ("c", "no"), ("d", "yes"))


def test_a_text_with_two_labels_in_one_split() -> None:
    (found,) = contradictions({"train": TRAIN}, None)
    assert (found.count, found.of, found.examples) == (1, 4, ["train row 1 (yes) and train row 3 (no)"])
    assert "1 of 4 texts (25%)" in found.note
    assert "over several splits" not in found.note


def test_rows_that_repeat_a_text_are_counted_in_each_split() -> None:
    held_out = split("validation", ("a", "yes"), ("z", "no"))
    rows = {"train": TRAIN, "validation": held_out}
    (found,) = (each for each in same_texts(rows, None) if each.name == "duplicate_rows")
    assert (found.count, found.of, found.examples, found.warns) == (2, 6, ["train row 3", "train row 5"], False)


@pytest.mark.parametrize(("repeated", "rows", "warns"), [(9, 100, False), (10, 1_000, True), (10, 1_100, False)])
def test_many_duplicates_are_warned_of(repeated: int, rows: int, warns: bool) -> None:
    many = split("train", *((str(number % (rows - repeated)), "yes") for number in range(rows)))
    (found,) = same_texts({"train": many}, "regression")
    assert (found.count, found.warns) == (repeated, warns)


def test_a_text_with_another_label_in_another_split() -> None:
    held_out = split("validation", ("d", "no"), ("b", "yes"), ("c", "no"))
    (found,) = contradictions({"train": TRAIN, "validation": held_out}, None)
    assert found.count == 2
    assert "1 of them over several splits" in found.note
    (found,) = contradictions({"train": split("train", ("d", "yes")), "validation": held_out}, None)
    assert found.examples == ["train row 1 (yes) and validation row 1 (no)"]


@pytest.mark.parametrize("kind", [None, "regression", MULTI])
def test_equal_labels_are_no_contradiction(kind: str | None) -> None:
    same = {"train": split("train", ("a", "1"), ("a", "1"), ("b", "2")), "test": split("test", ("b", "2"))}
    assert contradictions(same, kind) == []


def test_the_order_of_several_labels_means_nothing_and_scores_may_differ() -> None:
    assert contradictions({"train": split("train", ("a", "joy|love"), ("a", "love|joy"))}, MULTI) == []
    assert len(contradictions({"train": split("train", ("a", "joy|love"), ("a", "love"))}, MULTI)) == 1
    assert contradictions({"train": split("train", ("a", "1.5"), ("a", "2.5"))}, "regression") == []


def test_a_run_tells_of_a_leak_and_of_the_contradiction(tmp_path: Path) -> None:
    files = {}
    for name, rows in {"train": [("a", "x"), ("b ", "y"), ("c", "y")], "validation": [("b", "x")]}.items():
        files[f"{name}_file"] = str(tmp_path / f"{name}.jsonl")
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    leak, contradiction = load_splits(DataArguments(**files)).notes  # type: ignore[arg-type]
    assert "1 of 3 training rows also stand in" in leak
    assert "1 of them over several splits" in contradiction
    assert load_splits(DataArguments(**files, drop_leaked_rows=True)).notes[1:] == []  # type: ignore[arg-type]
