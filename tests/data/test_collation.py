"""Tokenised rows to the padded tensors of one micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, concatenate_datasets

from indictune.data.batching import NO_ROW, lengths_of
from indictune.data.cache import map_table, write_table
from indictune.data.collation import IGNORED_LABEL, IndexedRows, JoinRows, PadToLongest, Row

ROWS: list[Row] = [
    {"input_ids": np.array([2, 7, 8, 3]), "labels": 1, "seq_lengths": np.array([4]), "row": 5},
    {"input_ids": np.array([2, 3]), "labels": 0, "seq_lengths": np.array([2]), "row": 0},
]


def joined(rows: list[Row], uncounted_token: int | None = None) -> dict[str, Any]:
    batch = JoinRows(uncounted_token)(rows)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == (torch.int32 if name.startswith("cu_seq_lens") else torch.int64)
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.fixture
def dataset() -> Dataset:
    return Dataset.from_dict(
        {"input_ids": [[2, 7, 3], [2, 8, 9, 3]], "labels": [1, 0], "length": [3, 4], "language": ["hi", "te"]}
    )


def plain(row: Row) -> dict[str, object]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else int(value) for name, value in row.items()}


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, object]:
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_shorter_rows_are_padded_on_the_right() -> None:
    assert as_lists(PadToLongest(99, "right")(ROWS)) == {
        "input_ids": [[2, 7, 8, 3], [2, 3, 99, 99]],
        "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
        "labels": [1, 0],
    }


def test_shorter_rows_are_padded_on_the_left_for_decoders() -> None:
    assert as_lists(PadToLongest(99, "left")(ROWS)) == {
        "input_ids": [[2, 7, 8, 3], [99, 99, 2, 3]],
        "attention_mask": [[1, 1, 1, 1], [0, 0, 1, 1]],
        "labels": [1, 0],
    }


def test_a_token_that_is_also_the_padding_is_attended_to() -> None:
    batch = PadToLongest(3, "right")(ROWS)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_row_numbers_are_there_when_asked_for() -> None:
    batch = as_lists(PadToLongest(0, "right", with_row_numbers=True)(ROWS))
    assert batch["row_numbers"] == [5, 0]
    assert "row_numbers" not in PadToLongest(0, "right")(ROWS)


def test_rows_know_their_number_and_hold_only_what_the_model_reads(dataset: Dataset) -> None:
    rows = IndexedRows(dataset)
    assert len(rows) == 2
    assert plain(rows[1]) == {"input_ids": [2, 8, 9, 3], "labels": 0, "seq_lengths": [4], "row": 1}


def test_a_row_that_stands_for_nothing_is_two_tokens_that_nobody_counts(dataset: Dataset) -> None:
    row = IndexedRows(dataset)[NO_ROW]
    assert plain(row) == {"input_ids": [2, 7], "labels": -100, "seq_lengths": [2], "row": -1}
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED_LABEL


def test_it_is_in_a_batch_with_others_and_alone(dataset: Dataset) -> None:
    rows = IndexedRows(dataset)
    collate = PadToLongest(0, "right", with_row_numbers=True)
    assert as_lists(collate([rows[0], rows[NO_ROW]])) == {
        "input_ids": [[2, 7, 3], [2, 7, 0]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [1, -100],
        "row_numbers": [0, -1],
    }
    assert as_lists(collate([rows[NO_ROW]])) == {
        "input_ids": [[2, 7]], "attention_mask": [[1, 1]], "labels": [-100], "row_numbers": [-1],
    }  # fmt: skip


@pytest.fixture
def answers() -> Dataset:
    return Dataset.from_dict(
        {"input_ids": [[2, 7, 8, 3], [5, 6]], "labels": [[-100, -100, 8, 3], [-100, 6]], "language": ["hi", "te"]}
    )


def test_labels_of_tokens_are_padded_with_ones_that_nobody_counts(answers: Dataset) -> None:
    rows = IndexedRows(answers)
    assert as_lists(PadToLongest(99, "right", with_row_numbers=True)([rows[1], rows[0]])) == {
        "input_ids": [[5, 6, 99, 99], [2, 7, 8, 3]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
        "labels": [[-100, 6, -100, -100], [-100, -100, 8, 3]],
        "row_numbers": [1, 0],
    }
    assert PadToLongest(99, "left")([rows[1], rows[0]])["labels"].tolist() == [
        [-100, -100, -100, 6], [-100, -100, 8, 3],
    ]  # fmt: skip


def test_a_row_for_nothing_has_labels_for_its_tokens_where_the_others_have(answers: Dataset) -> None:
    rows = IndexedRows(answers)
    assert plain(rows[NO_ROW]) == {"input_ids": [2, 7], "labels": [-100, -100], "seq_lengths": [2], "row": -1}
    assert as_lists(PadToLongest(0, "right")([rows[NO_ROW]])) == {
        "input_ids": [[2, 7]], "attention_mask": [[1, 1]], "labels": [[-100, -100]],
    }  # fmt: skip
    assert joined([rows[NO_ROW]]) == {
        "input_ids": [[2, 7]], "labels": [[-100, -100]], "position_ids": [[0, 1]],
        "cu_seq_lens_q": [0, 2], "cu_seq_lens_k": [0, 2], "max_length_q": 2, "max_length_k": 2,
    }  # fmt: skip


def test_a_dummy_row_where_the_first_row_has_one_token() -> None:
    rows = IndexedRows(Dataset.from_dict({"input_ids": [[4], [5, 6]], "labels": [[-100], [-100, 6]]}))
    assert plain(rows[NO_ROW]) == {"input_ids": [4], "labels": [-100], "seq_lengths": [1], "row": -1}


def test_packs_become_one_sequence_whose_positions_begin_again_at_each_document() -> None:
    packed = Dataset.from_dict(
        {
            "input_ids": [[2, 7, 3, 5, 6], [8, 9]],
            "labels": [[-100, 7, 3, -100, 6], [-100, 9]],
            "seq_lengths": [[3, 2], [2]],
            "rows": [[0, 2], [1]],
            "length": [5, 2],
        }
    )
    rows = IndexedRows(packed)
    assert plain(rows[0]) == {
        "input_ids": [2, 7, 3, 5, 6], "labels": [-100, 7, 3, -100, 6], "seq_lengths": [3, 2], "row": 0,
    }  # fmt: skip
    assert joined([rows[0], rows[1]]) == {
        "input_ids": [[2, 7, 3, 5, 6, 8, 9]],
        "labels": [[-100, 7, 3, -100, 6, -100, 9]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1]],
        "cu_seq_lens_q": [0, 3, 5, 7],
        "cu_seq_lens_k": [0, 3, 5, 7],
        "max_length_q": 3,
        "max_length_k": 3,
    }


def test_rows_of_a_classifier_become_one_sequence_with_a_label_for_each_row() -> None:
    expected = {
        "input_ids": [[2, 7, 8, 3, 2, 3]],
        "labels": [1, 0],
        "position_ids": [[2, 3, 4, 5, 2, 3]],
        "cu_seq_lens_q": [0, 4, 6],
        "cu_seq_lens_k": [0, 4, 6],
        "max_length_q": 4,
        "max_length_k": 4,
    }
    assert joined(ROWS, uncounted_token=1) == expected
    assert joined(ROWS, uncounted_token=7)["position_ids"] == [[8, 7, 9, 10, 8, 9]]
    assert joined(ROWS)["position_ids"] == [[0, 1, 2, 3, 0, 1]]


def test_numbers_of_any_width_become_int64() -> None:
    narrow = {"input_ids": np.array([2, 3], dtype=np.int32), "labels": np.int32(1), "seq_lengths": np.array([2])}
    assert joined([{**narrow, "row": 0}])["labels"] == [1]
    assert as_lists(PadToLongest(0, "right")([{**narrow, "row": 0}]))["labels"] == [1]


def test_rows_are_read_where_they_lie_in_tables_of_several_pieces_too() -> None:
    pieces = [Dataset.from_dict({"input_ids": ids, "labels": [0] * len(ids)}) for ids in ([[1], [2, 3]], [[4, 5, 6]])]
    rows = IndexedRows(concatenate_datasets([*pieces, pieces[0]]))
    assert [plain(rows[index])["input_ids"] for index in range(5)] == [[1], [2, 3], [4, 5, 6], [1], [2, 3]]
    backwards = IndexedRows(pieces[0].select([1, 0]))
    assert [plain(backwards[index])["input_ids"] for index in range(2)] == [[2, 3], [1]]
    assert lengths_of(Dataset.from_dict({"length": [3, 1, 2]})).tolist() == [3, 1, 2]


def mapped_bytes() -> int:
    """Bytes of files that this process holds in memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


def test_rows_that_were_read_leave_the_memory(tmp_path: Path) -> None:
    """The file has 60 MB, and a row of it 40 kB."""
    texts = pa.array([np.arange(10_000, dtype=np.int32)] * 1_500)
    batch = pa.record_batch({"input_ids": texts, "labels": pa.array([1] * 1_500)})
    write_table(tmp_path / "rows.arrow", batch.schema, [batch])
    rows = IndexedRows(Dataset(map_table(tmp_path / "rows.arrow"), fingerprint="rows"))
    before = mapped_bytes()
    most = 0
    for number in range(len(rows)):
        assert rows[number]["input_ids"].sum() == 49_995_000
        most = max(most, mapped_bytes() - before)
    assert most < 30_000_000
