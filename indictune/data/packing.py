"""Rows of tokens of a language model, packed end to end into longer ones, which attention keeps apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.cache import StoredRows, forget_mapped, map_table, with_progress, write_table
from indictune.data.text.tokenisation import mapped_dataset

if TYPE_CHECKING:
    from datasets import Dataset

# Packed together; enough to find good fits.
_GROUP_ROWS = 10_000
_BATCH_PACKS = 200

_LIST = pa.list_(pa.int32())
SCHEMA = pa.schema({"input_ids": _LIST, "labels": _LIST, "seq_lengths": _LIST, "rows": _LIST, "length": pa.int32()})


@dataclass(frozen=True)
class TokenRows:
    """The rows of a run as a language model reads them.

    Attributes:
        datasets: by split, columns `input_ids`, `labels`, `length` and `rows` (indices of conversations or documents).
            Packed training rows have `seq_lengths` too; the others `language`.
        rows: the conversations or documents, by split.
        folder: holds the rejected rows, if there are any.
        summary: how rows were packed; empty without packing.
        truncated: language -> share of the training conversations that are cut.
    """

    datasets: Mapping[str, Dataset]
    rows: Mapping[str, StoredRows]
    folder: Path
    summary: str
    notes: Sequence[str]
    truncated: Mapping[str, float] = field(default_factory=dict)

    def location(self, index: int) -> str:
        """Where training row `index` (from 0), or each row of pack `index`, stands: `file:line`."""
        numbers = dict.fromkeys(self.datasets["train"][index]["rows"])
        return ", ".join(map(self.rows["train"].location, numbers))

    def location_in(self, split: str, index: int) -> str:
        """Where a row of a split that is not packed stands."""
        return self.rows[split].location(self.datasets[split][index]["rows"][0])


class TextsOfRows:
    """The text of each row of a split that is not packed, made from cells of columns. It can be read many times."""

    def __init__(self, made: TokenRows, split: str, columns: Sequence[str], text_of: Callable[..., str]) -> None:
        self._columns, self._text_of = [made.rows[split].table[name] for name in columns], text_of
        self._rows = pc.list_flatten(made.datasets[split].data["rows"])

    def __iter__(self) -> Iterator[str]:
        for row in self._rows:
            yield self._text_of(*(cells[row.as_py()].as_py() for cells in self._columns))


def stored_groups(path: Path) -> Iterator[pa.Table]:
    """The rows of a file in groups that are packed together."""
    table = map_table(path)
    for start in range(0, table.num_rows, _GROUP_ROWS):
        yield table.slice(start, _GROUP_ROWS)
        forget_mapped()


def packed(groups: Iterable[pa.Table], max_length: int) -> Iterator[pa.RecordBatch]:
    """Pack rows by best fit decreasing: the longest first, each where it leaves the least space.

    Args:
        groups: columns `input_ids`, `labels` and `rows`, of 1 to `max_length` tokens; a pack holds rows of one group.

    Yields:
        Columns `input_ids`, `labels`, `seq_lengths` (tokens of each row of the pack), `rows` (theirs, in the same
        order) and `length` (tokens of the pack). Every row is in one pack, once.
    """
    for group in groups:
        columns = [group[name] for name in ("input_ids", "labels")]
        lengths = pc.list_value_length(group["input_ids"]).to_numpy()
        numbers = pc.list_flatten(group["rows"]).to_numpy()
        packs = _packs(lengths, max_length)
        for start in range(0, len(packs), _BATCH_PACKS):
            yield _batch(packs[start : start + _BATCH_PACKS], columns, lengths, numbers)


def _packs(lengths: np.ndarray, max_length: int) -> list[np.ndarray]:
    """The indices of the rows in each pack. TRL's `pack_dataset` (1.16) gives the same, and need not be installed."""
    packs, free = list[list[int]](), list[tuple[int, int, int]]()  # places of a pack, when it got so many, the pack
    for time, row in enumerate(np.argsort(-lengths, kind="stable").tolist()):
        length = int(lengths[row])
        at = bisect_left(free, (length,))
        if at == len(free):
            packs.append([])
            places, pack = max_length, len(packs) - 1
        else:
            places, _, pack = free.pop(at)
        packs[pack].append(row)
        if places > length:
            insort(free, (places - length, time, pack))
    return [np.array(rows) for rows in packs]


def packing_facts(packed: Dataset, max_length: int) -> str:
    """A sentence for the log: rows, packs, and the share of empty places."""
    rows = int(pc.sum(pc.list_value_length(packed.data["rows"])).as_py())
    packs = len(packed)
    empty = 1 - pc.sum(packed.data["length"]).as_py() / (packs * max_length)
    return f"{rows:,} rows in {packs:,} packs of {max_length:,} places for tokens; {empty:.1%} of these are empty"


def _batch(
    packs: Sequence[np.ndarray], columns: Sequence[pa.ChunkedArray], lengths: np.ndarray, numbers: np.ndarray
) -> pa.RecordBatch:
    """The columns of some packs: indices of rows in the group. `numbers` has the index of each row in the split."""
    rows = np.concatenate(packs)
    pack_rows = [len(pack) for pack in packs]
    pack_lengths = np.array([lengths[pack].sum() for pack in packs], dtype=np.int32)
    tokens = [pc.list_flatten(column.take(rows)).to_numpy() for column in columns]
    of_packs = (_lists(pack_lengths, values) for values in tokens)
    of_rows = (_lists(pack_rows, values[rows]) for values in (lengths, numbers))
    return pa.record_batch([*of_packs, *of_rows, pa.array(pack_lengths)], schema=SCHEMA)


def _lists(lengths: Sequence[int] | np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values)


def pack_table(path: Path, max_length: int) -> str:
    """Pack the rows of a table, which is written again; returns a sentence about the packs."""
    groups = with_progress(stored_groups(path), "packing the train rows", map_table(path).num_rows)
    write_table(path, SCHEMA, packed(groups, max_length))
    return packing_facts(mapped_dataset(path.parent, path.stem), max_length)
