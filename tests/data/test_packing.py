"""Rows end to end in packs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from indictune.data.cache import write_table
from indictune.data.packing import packed, packing_facts, stored_groups
from tests.data.packs import pack


def dataset(*lengths: int) -> Dataset:
    """Tokens of row i: 100 i + 1, 100 i + 2, ...; the first of them has no label."""
    ids = [[100 * row + 1 + place for place in range(length)] for row, length in enumerate(lengths)]
    labels = [[-100, *row[1:]] for row in ids]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "rows": [[row] for row in range(len(ids))]})


def test_the_longest_rows_come_first_and_each_goes_where_it_leaves_the_least_space() -> None:
    # Of 6 places: row 2 takes 5 and row 1 the 1 that is left; row 0 takes 4; row 3 takes 3 and row 4 the 2 next to 4.
    assert pack(dataset(4, 1, 5, 3, 2), 6).to_dict() == {
        "input_ids": [[201, 202, 203, 204, 205, 101], [1, 2, 3, 4, 401, 402], [301, 302, 303]],
        "labels": [[-100, 202, 203, 204, 205, -100], [-100, 2, 3, 4, -100, 402], [-100, 302, 303]],
        "seq_lengths": [[5, 1], [4, 2], [3]],
        "rows": [[2, 1], [0, 4], [3]],
        "length": [6, 6, 3],
    }


def test_the_facts_count_rows_packs_and_empty_places() -> None:
    facts = packing_facts(pack(dataset(4, 1, 5, 3, 2), 6), 6)
    assert facts == "5 rows in 3 packs of 6 places for tokens; 16.7% of these are empty"


def test_rows_of_a_selection_keep_their_numbers() -> None:
    packed = pack(dataset(4, 1, 5, 3, 2).select([4, 2, 0]), 6)
    assert packed["input_ids"][:] == [[201, 202, 203, 204, 205], [1, 2, 3, 4, 401, 402]]
    assert packed["rows"][:] == [[2], [0, 4]]


@pytest.fixture(scope="module")
def many() -> tuple[Dataset, Dataset]:
    """More rows than are packed together, and their packs of 8 places."""
    lengths = np.random.default_rng(0).integers(1, 9, size=25_003).tolist()
    rows = dataset(*lengths)
    return rows, pack(rows, 8)


def test_every_row_stands_whole_in_one_pack(many: tuple[Dataset, Dataset]) -> None:
    rows, packed = many
    ids, labels = rows["input_ids"][:], rows["labels"][:]
    seen = []
    for found in packed:
        assert found["input_ids"] == [token for row in found["rows"] for token in ids[row]]
        assert found["labels"] == [label for row in found["rows"] for label in labels[row]]
        assert found["seq_lengths"] == [len(ids[row]) for row in found["rows"]]
        assert found["length"] == sum(found["seq_lengths"]) <= 8
        seen += found["rows"]
    assert sorted(seen) == list(range(25_003))


def test_packs_of_many_rows_are_nearly_full(many: tuple[Dataset, Dataset]) -> None:
    rows, packed = many
    tokens = sum(map(len, rows["input_ids"][:]))
    assert len(packed) * 8 - tokens < 0.01 * tokens


@pytest.mark.more
def test_packs_are_the_same_every_time(many: tuple[Dataset, Dataset]) -> None:
    rows, packed = many
    assert pack(rows, 8).to_dict() == packed.to_dict()


def test_packs_are_those_of_trl(many: tuple[Dataset, Dataset]) -> None:
    from trl.data_utils import pack_dataset

    rows, packs = many
    columns = rows.select_columns(["input_ids", "labels"])
    theirs = pack_dataset(columns, 8, strategy="bfd", map_kwargs={"batch_size": 10_000})
    for name in ("input_ids", "labels", "seq_lengths"):
        assert packs[name][:] == theirs[name][:]


@pytest.mark.more
def test_stored_rows_are_packed_like_those_in_memory(many: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    rows, packs = many
    table = rows.with_format("arrow")[:].cast(
        pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels", "rows")])
    )
    write_table(tmp_path / "rows.arrow", table.schema, table.to_batches(max_chunksize=700))
    stored = pa.Table.from_batches(packed(stored_groups(tmp_path / "rows.arrow"), 8))
    assert stored.to_pydict() == packs.to_dict()
