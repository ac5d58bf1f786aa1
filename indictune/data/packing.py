"""Several short rows end to end in one long one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from indictune.data.collation import ListColumn
from indictune.data.tables import map_table

# Packed together: enough to find good fits.
_GROUP_ROWS = 10_000
_BATCH_PACKS = 200

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("seq_lengths", pa.list_(pa.int32())),
        ("rows", pa.list_(pa.int32())),
        ("length", pa.int32()),
    ]
)


def pack(dataset: Dataset, max_length: int) -> Dataset:
    """Put rows together by best fit decreasing: the longest first, each where it leaves the least space; in memory.

    Args:
        dataset: columns `input_ids` and `labels`, rows of 1 to `max_length` tokens.
        max_length: tokens of a pack at most.

    Returns:
        Columns `input_ids`, `labels`, `seq_lengths` (tokens of each row of the pack), `rows` (their indices in
        `dataset`, in the same order) and `length` (tokens of the pack). Every row stands in one pack, once.
    """
    rows = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")
    return Dataset(pa.Table.from_batches(packed(rows.iter(_GROUP_ROWS), max_length), SCHEMA))


def stored_groups(path: Path) -> Iterator[pa.Table]:
    """The rows of a file, as many at a time as are packed together.

    Each group is mapped anew, because memory that was mapped counts as used until its map is gone.
    """
    for start in range(0, map_table(path).num_rows, _GROUP_ROWS):
        yield map_table(path).slice(start, _GROUP_ROWS)


def packed(groups: Iterable[pa.Table], max_length: int) -> Iterator[pa.RecordBatch]:
    """The packs of `pack`, some at a time, each of rows of one group."""
    first_row = 0
    for group in groups:
        columns = [ListColumn(group[name]) for name in ("input_ids", "labels")]
        lengths = pc.list_value_length(group["input_ids"]).to_numpy()
        packs = best_fit_decreasing(lengths, max_length)
        for start in range(0, len(packs), _BATCH_PACKS):
            yield _batch(packs[start : start + _BATCH_PACKS], columns, lengths, first_row)
        first_row += group.num_rows


def best_fit_decreasing(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """The rows of each pack, by index, as TRL's `pack_dataset` puts them together; but from their lengths alone.

    Args:
        lengths: of the rows, from 1 to `max_length`.
        max_length: of a pack.
    """
    packs: list[list[int]] = []
    spaces: list[int] = []  # those that packs have left, from small to large
    with_space: dict[int, deque[list[int]]] = {}
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        best = bisect_left(spaces, length)
        if best == len(spaces):
            space = max_length
            packs.append(pack := [])
        else:
            space = spaces[best]
            pack = with_space[space].popleft()
            if not with_space[space]:
                del spaces[best]
        pack.append(row)
        left = space - length
        if left:
            same = with_space.setdefault(left, deque())
            if not same:
                insort(spaces, left)
            same.append(pack)
    return packs


def packing_facts(packed: Dataset, max_length: int) -> str:
    """A sentence for the log: rows, packs, and the share of the packs' places that are empty."""
    rows = int(pc.sum(pc.list_value_length(packed.data["rows"])).as_py())
    places = len(packed) * max_length
    empty = 1 - pc.sum(packed.data["length"]).as_py() / places
    return f"{rows:,} rows in {len(packed):,} packs of {max_length:,} places for tokens; {empty:.1%} of them are empty"


def _batch(
    packs: Sequence[Sequence[int]], columns: Sequence[ListColumn], lengths: np.ndarray, first_row: int
) -> pa.RecordBatch:
    """The columns of some packs; rows are counted from the group's first, which has the index `first_row`."""
    rows = np.fromiter(chain.from_iterable(packs), np.int32)
    pack_rows = [len(pack) for pack in packs]
    pack_lengths = np.array([lengths[pack].sum() for pack in packs], dtype=np.int32)
    tokens = [np.concatenate([column[row] for row in rows], dtype=np.int32) for column in columns]
    arrays = [
        *(_lists(pack_lengths, values) for values in tokens),
        _lists(pack_rows, lengths[rows]),
        _lists(pack_rows, rows + np.int32(first_row)),
        pa.array(pack_lengths),
    ]
    return pa.record_batch(arrays, schema=SCHEMA)


def _lists(lengths: Sequence[int] | np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values)
