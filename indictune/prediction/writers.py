"""Write labelled rows as csv, tsv, jsonl or parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.columns import joined_list
from indictune.errors import UserError
from indictune.prediction.labelled_rows import as_records

_DIGITS = 6  # of a score; float32 has seven
Write = Callable[[BinaryIO, Iterable[pa.RecordBatch]], None]


def writer_of(path: str) -> Write:
    """The function that writes the kind of file that the extension says.

    Raises:
        UserError: `file-kind-unknown`.
    """
    extension = Path(path).suffix.lower()
    if extension not in _WRITERS:
        raise UserError("file-kind-unknown", "--output_file", path, expected=", ".join(_WRITERS))
    return _WRITERS[extension]


def json_lines(batch: pa.RecordBatch) -> str:
    """A line of JSON for each row, with the scores of its labels in one object."""
    return "".join(f"{json.dumps(rounded(row), ensure_ascii=False)}\n" for row in as_records(batch))


def rounded(value: Any) -> Any:
    """A row with as many digits of its scores as they have."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value


def _write_json_lines(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        file.write(json_lines(batch).encode())


def _write_parquet(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    writer = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(file, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


def _delimited(delimiter: str) -> Write:
    def write(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        lines = csv.writer(text, delimiter=delimiter, lineterminator="\n")
        for number, batch in enumerate(batches):
            if number == 0:
                lines.writerow(batch.schema.names)
            lines.writerows(zip(*(map(_cell, batch[name].to_pylist()) for name in batch.schema.names), strict=True))
        text.flush()
        text.detach()

    return write


def _cell(value: Any) -> Any:
    """A value as training reads it from a csv file: several labels as `a|b`, none of them as `|`."""
    return round(value, _DIGITS) if isinstance(value, float) else joined_list(value)


_WRITERS: dict[str, Write] = {
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
