"""Several short rows end to end in one long one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

# Packed together: enough to find good fits, few enough for arrow's 32-bit offsets with rows of 131,072 tokens.
_BATCH_ROWS = 10_000


def pack(dataset: Dataset, max_length: int) -> Dataset:
    """Put rows together by best fit decreasing: the longest first, each where it leaves the least space.

    Args:
        dataset: columns `input_ids` and `labels`, rows of 1 to `max_length` tokens.
        max_length: tokens of a pack at most.

    Returns:
        Columns `input_ids`, `labels`, `seq_lengths` (tokens of each row of the pack), `rows` (their indices in
        `dataset`, in the same order) and `length` (tokens of the pack). Every row stands in one pack, once.
    """
    from trl.data_utils import pack_dataset

    rows = dataset.select_columns(["input_ids", "labels"]).with_format("arrow")
    batches = {"batch_size": _BATCH_ROWS, "desc": "packing"}
    numbered = rows.map(_number_tokens, with_indices=True, batched=True, **batches)
    packed = pack_dataset(numbered, max_length, strategy="bfd", map_kwargs=batches)
    return packed.map(_number_rows, batched=True, **batches).with_format(None)


def packing_facts(packed: Dataset, max_length: int) -> str:
    """A sentence for the log: rows, packs, and the share of the packs' places that are empty."""
    rows = int(pc.sum(pc.list_value_length(packed.data["rows"])).as_py())
    places = len(packed) * max_length
    empty = 1 - pc.sum(packed.data["length"]).as_py() / places
    return f"{rows:,} rows in {len(packed):,} packs of {max_length:,} places for tokens; {empty:.1%} of them are empty"


def _number_tokens(batch: pa.Table, indices: Sequence[int]) -> pa.Table:
    """Say at every token which row it belongs to, because TRL packs columns of tokens alone."""
    lengths = pc.list_value_length(batch["input_ids"]).to_numpy()
    return batch.append_column("rows", _lists(lengths, np.repeat(np.array(indices, dtype=np.int32), lengths)))


def _number_rows(batch: pa.Table) -> pa.Table:
    """Say once for every row of a pack what `_number_tokens` said at each of its tokens."""
    row_lengths = pc.list_flatten(batch["seq_lengths"]).to_numpy()
    first_tokens = np.cumsum(row_lengths) - row_lengths
    rows = pc.list_flatten(batch["rows"]).to_numpy()[first_tokens]
    numbered = batch.drop_columns("rows").append_column(
        "rows", _lists(pc.list_value_length(batch["seq_lengths"]).to_numpy(), rows)
    )
    return numbered.append_column("length", pc.list_value_length(batch["input_ids"]))


def _lists(lengths: np.ndarray, values: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), values)
