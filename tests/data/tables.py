"""A data file as one table."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from indictune.data.bad_rows import BadRows
from indictune.data.columns import Wanted
from indictune.data.read.read_files import read_batches


def read_table(path: str, columns: Mapping[str, str], optional: Mapping[str, str] | None = None) -> pa.Table:
    """All rows of `read_batches`, none of them bad."""
    bad = BadRows(path)
    batches = list(read_batches(path, Wanted(columns, optional or {}), bad))
    bad.finish(0)
    return pa.Table.from_batches(batches)
