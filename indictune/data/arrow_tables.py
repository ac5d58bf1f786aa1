"""Write tables to disk batch by batch, and read them by mapping the file into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write record batches as an Arrow file, one after the other."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def map_table(path: Path) -> pa.Table:
    """The table of a file, mapped: only what is read comes into memory, and processes share it."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def stored_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of a file. Each is read, not mapped, so its memory is freed after use."""
    with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def smaller_batches(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows, at most `rows` at a time."""
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)
