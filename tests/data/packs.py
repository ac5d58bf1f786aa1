"""Packs in memory."""

from __future__ import annotations

import pyarrow as pa
from datasets import Dataset

from indictune.data.packing import SCHEMA, packed


def pack(rows: Dataset, max_length: int) -> Dataset:
    """The packs of a run, as many rows at a time as from a file."""
    numbered = rows if "rows" in rows.column_names else rows.add_column("rows", [[row] for row in range(len(rows))])
    groups = numbered.select_columns(["input_ids", "labels", "rows"]).with_format("arrow").iter(10_000)
    return Dataset(pa.Table.from_batches(packed(groups, max_length), SCHEMA))
