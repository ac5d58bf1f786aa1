"""A data file as one table."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from indictune.data.reading import read_batches
from indictune.data.rejects import BadRows


def read_table(path: str, columns: Mapping[str, str], optional: Mapping[str, str] | None = None) -> pa.Table:
    """All rows of `read_batches`."""
    return pa.Table.from_batches(list(read_batches(path, columns, optional or {}, BadRows(path))))
