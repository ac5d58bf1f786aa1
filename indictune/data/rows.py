"""The rows of a split, as a table on disk that every process maps into memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import file_and_line, row_location


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


MAX_LISTED_ROWS = 20
BETWEEN_MESSAGES = "\x00"  # in the text of a conversation
_MAX_LOCATIONS = 10

_FACTS = "facts.json"
# Compared with the held-out rows at a time: each comparison gathers their texts again.
_LEAK_BATCHES = 10
_TEXTS_AT_ONCE = 10_000


@dataclass(frozen=True)
class StoredRows:
    """The rows of one split.

    Attributes:
        table: with a column `line` (int64): line of the file, or number of the row in a parquet file or dataset, from
            1.
        source: the file or dataset they come from, as messages name it.
        origin: the flag that named it.
        files: of the split, if it has several; `line` then includes the file's number times `LINES_PER_FILE`.
    """

    table: pa.Table
    source: str
    origin: str
    files: Sequence[str] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def location(self, index: int) -> str:
        """Where row `index` (from 0) stands: `file:line`."""
        return row_location(self.source, self.table["line"][index].as_py(), self.files)

    def file(self, index: int) -> str:
        """The file of row `index` (from 0)."""
        return file_and_line(self.source, self.table["line"][index].as_py(), self.files)[0]


class Column:
    """The texts of a column of a table, without holding all of them as Python objects. It can be read many times."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._column = column

    def __iter__(self) -> Iterator[str]:
        for chunk in self._column.chunks:
            for start in range(0, len(chunk), _TEXTS_AT_ONCE):
                yield from chunk.slice(start, _TEXTS_AT_ONCE).to_pylist()


def listed_locations(lines: pa.ChunkedArray, location: Callable[[int], str]) -> str:
    """The locations of the first few rows, given by their lines, and the number of the others."""
    more = f" and {len(lines) - _MAX_LOCATIONS:,} more" if len(lines) > _MAX_LOCATIONS else ""
    return ", ".join(map(location, lines[:_MAX_LOCATIONS].to_pylist())) + more


def leaked_rows(
    path: Path, held_out: pa.Table, text_of: Callable[[pa.RecordBatch], pa.Array]
) -> Iterator[pa.BooleanArray]:
    """Which rows of the table at `path` have a text that held-out rows have too, an array for each record batch."""
    values = pa.chunked_array([text_of(batch) for batch in held_out.to_batches()], pa.string())
    batches = stored_batches(path)
    while some := list(islice(batches, _LEAK_BATCHES)):
        masks = pc.is_in(pa.chunked_array([text_of(batch) for batch in some]), value_set=values)
        mask = masks.combine_chunks()  # arrow may cut it elsewhere than the texts
        starts = accumulate((batch.num_rows for batch in some), initial=0)
        yield from (mask.slice(start, batch.num_rows) for start, batch in zip(starts, some, strict=False))


def text_keys(texts: Iterable[str], salt: str = "-") -> npt.NDArray[np.uint64]:
    """A hash of each text, uint64 [texts]; equal for equal texts. Another salt gives others."""
    digests = (blake2b(text.encode(), digest_size=8, key=salt.encode()).digest() for text in texts)
    return np.fromiter(map(int.from_bytes, digests), np.uint64)


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Store what else is known of the tables in a folder, as json."""
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def read_facts(folder: Path) -> Any:
    """What `write_facts` stored."""
    return json.loads((folder / _FACTS).read_text(encoding="utf-8"))
