"""Folds: stratified by label, alike texts together, each row held out once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from indictune.data.cache import StoredRows
from indictune.data.columns import BETWEEN_TEXTS
from indictune.sweep.folds import divide, write_folds
from tests.refusals import refused


def stored(texts: list[str], labels: list[str]) -> StoredRows:
    """Rows of a file, the first in line 2."""
    columns = {"text": texts, "label": labels, "language": ["hi"] * len(texts)}
    return StoredRows(pa.table({**columns, "line": pa.array(range(2, len(texts) + 2))}), "t.csv", "--train_file")


def tweets(number: int) -> list[str]:
    """Texts that do not resemble each other."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghij ", k=60)) for _ in range(number)]


def rows_in(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").split("\n")[:-1]]


def test_folds_are_stratified_and_each_row_is_held_out_once(tmp_path: Path) -> None:
    labels = ["pos"] * 60 + ["neg"] * 30 + ["neutral"] * 10
    rows = stored(tweets(100), labels)
    fold_of_row = divide(rows, 5, seed=3)
    for fold in range(5):
        held_out = np.array(labels)[fold_of_row == fold]
        assert {name: int((held_out == name).sum()) for name in set(labels)} == {"pos": 12, "neg": 6, "neutral": 2}
    assert (divide(rows, 5, seed=3) == fold_of_row).all()
    assert (divide(rows, 5, seed=4) != fold_of_row).any()
    seen = []
    for named in write_folds(tmp_path, {"train": rows}, 5, seed=3):
        parts = [rows_in(named[name][0]) for name in ("train_file", "test_file")]
        assert sorted(row["number"] for part in parts for row in part) == list(range(100))
        seen += [row["row"] for row in parts[1]]
    assert sorted(seen) == sorted(f"t.csv:{line}" for line in range(2, 102))


def test_texts_that_are_alike_are_in_one_fold() -> None:
    alone = tweets(60)
    texts = [*alone, *(text.upper() + "!!" for text in alone), *alone]
    fold_of_row = divide(stored(texts, ["pos", "neg"] * 90), 4, seed=0).reshape(3, 60)
    assert (fold_of_row == fold_of_row[0]).all()


def test_pairs_and_validation_rows_are_written_in_columns_of_their_own(tmp_path: Path) -> None:
    texts = [f"{first}{BETWEEN_TEXTS}second {first}" for first in tweets(8)]
    rows = {"train": stored(texts, ["a", "b"] * 4), "validation": stored(texts[:1], ["a"])}
    flags = write_folds(tmp_path, rows, 2, seed=0)
    assert flags[0]["text_pair_column"] == ["text_pair"]
    (row,) = rows_in(flags[0]["validation_file"][0])
    assert row["text_pair"] == f"second {row['text']}"


@pytest.mark.parametrize("repeated", [0, 5])
def test_a_label_that_a_fold_would_lack_is_named(repeated: int) -> None:
    texts = tweets(30)
    texts[1 : 1 + repeated] = [texts[0]] * repeated
    labels = ["rare"] * (3 + repeated) + ["pos"] * (27 - repeated)
    with refused("fold-lacks-label", "rare", "3 different texts", flag="--folds"):
        divide(stored(texts, labels), 5, seed=0)
