"""Write tables to disk batch by batch, and read them by mapping the file into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
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


def move_rows(path: Path, other: Path, chosen: npt.NDArray[np.bool_]) -> None:
    """Move the chosen rows of the file `path` to the file `other`; both keep their order."""
    schema, unfinished = map_table(path).schema, path.with_suffix(".unfinished")
    write_table(other, schema, _filtered(path, chosen))
    write_table(unfinished, schema, _filtered(path, ~chosen))
    unfinished.rename(path)


def _filtered(path: Path, chosen: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in stored_batches(path):
        yield batch.filter(pa.array(chosen[start : start + batch.num_rows]))
        start += batch.num_rows
