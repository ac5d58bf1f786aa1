"""What a model learns of labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset

from indictune.config.arguments import DataArguments, ProblemType
from indictune.data.batching import NO_ROW
from indictune.data.cache import StoredRows
from indictune.data.collation import IndexedRows, JoinRows, PadToLongest
from indictune.data.labels import parts, targets
from indictune.data.load_rows import load_splits
from indictune.data.row_choice import Splits
from indictune.data.text.tokenisation import schema_of
from indictune.errors import UserError
from tests.refusals import refused

Labels = list[object]
REGRESSION: ProblemType = "regression"
MULTI_LABEL: ProblemType = "multi_label_classification"


def split(
    folder: Path, problem_type: ProblemType, labels: Labels, held_out: Labels | None = None
) -> Splits[StoredRows]:
    """The splits of jsonl rows with these labels."""
    named = {"train": labels} | ({} if held_out is None else {"validation": held_out})
    for name, values in named.items():
        rows = [json.dumps({"text": f"{name} {number}", "label": value}) for number, value in enumerate(values)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    held_out_file = None if held_out is None else str(folder / "validation.jsonl")
    train_file = str(folder / "train.jsonl")
    return load_splits(DataArguments(train_file=train_file, validation_file=held_out_file, problem_type=problem_type))


def codes(folder: Path, problem_type: ProblemType, labels: Labels, held_out: Labels | None = None) -> list[str]:
    with pytest.raises(UserError) as refused:
        split(folder, problem_type, labels, held_out)
    return [f"{Path(str(each.value)).name} {each.code}" for each in refused.value.problems]


def test_a_score_is_a_float(tmp_path: Path) -> None:
    splits = split(tmp_path, REGRESSION, [0.5, "1e-1", 3])
    assert splits.labels == ["score"]
    assert targets(splits.rows["train"].table["label"].to_pylist(), splits.labels, REGRESSION).to_pylist() == [
        0.5,
        pytest.approx(0.1),
        3.0,
    ]


@pytest.mark.parametrize("label", ["high", "inf", "1e39", -100])
def test_what_is_no_score_is_refused_with_its_place(tmp_path: Path, label: object) -> None:
    assert codes(tmp_path, REGRESSION, [1.5, 2.5], [1.5, label]) == ["validation.jsonl:2 label-not-number"]


def test_a_row_has_the_labels_between_its_bars_or_in_its_list(tmp_path: Path) -> None:
    splits = split(tmp_path, MULTI_LABEL, ["joy|love", ["anger"], [], " love | joy "])
    assert splits.labels == ["anger", "joy", "love"]
    given = targets(splits.rows["train"].table["label"].to_pylist(), splits.labels, MULTI_LABEL).to_pylist()
    assert given == [[0, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1]]


def test_a_parquet_column_may_hold_lists(tmp_path: Path) -> None:
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.table({"text": ["a", "b"], "label": [["x", "y"], ["y"]]}), path)
    splits = load_splits(DataArguments(train_file=path, problem_type=MULTI_LABEL))
    assert [parts(label) for label in splits.rows["train"].table["label"].to_pylist()] == [["x", "y"], ["y"]]


def test_a_bar_is_a_part_of_a_single_label(tmp_path: Path) -> None:
    with refused("label-unknown", "2 rows", "validation.jsonl:2"):
        split(tmp_path, "single_label_classification", ["x|y", "z"], ["x|y", "x", "x"])


def test_a_list_is_refused_where_a_row_has_one_label(tmp_path: Path) -> None:
    assert codes(tmp_path, "single_label_classification", [["a"], "b"]) == ["train.jsonl:1 value-of-wrong-type"]


def test_unseen_parts_and_a_single_label_are_refused(tmp_path: Path) -> None:
    assert codes(tmp_path, MULTI_LABEL, ["a|b", "b"], ["b", "c|a"]) == ["validation.jsonl label-unknown"]
    assert codes(tmp_path, MULTI_LABEL, ["a", "|"]) == ["train.jsonl one-label"]


@pytest.mark.parametrize(
    ("problem_type", "written", "expected"),
    [
        (REGRESSION, ["0.5", "2"], torch.tensor([0.5, 2, -100])),
        (MULTI_LABEL, ["a", "a|c"], torch.tensor([[1, 0, 0], [1, 0, 1], [-100] * 3])),
    ],
)
def test_batches_keep_numbers_and_lists_padded_and_joined(
    problem_type: str, written: list[str], expected: torch.Tensor
) -> None:
    labels = ["score"] if problem_type == REGRESSION else ["a", "b", "c"]
    columns = {
        "input_ids": pa.array([[5, 6, 7], [8, 9]], pa.list_(pa.int32())),
        "labels": targets(written, labels, problem_type),
        "length": pa.array([3, 2], pa.int32()),
        "language": ["hi", "ta"],
    }
    rows = IndexedRows(Dataset(pa.table(columns, schema_of(labels, problem_type))))
    batch = [rows[0], rows[1], rows[NO_ROW]]
    for collate in (PadToLongest(0, "right"), JoinRows(labels_of_tokens=False)):
        found = collate(batch)["labels"]
        assert found.tolist() == expected.tolist()
        assert found.dtype == (torch.float32 if problem_type == REGRESSION else torch.int64)
    assert isinstance(rows[0]["labels"], np.generic | np.ndarray)
