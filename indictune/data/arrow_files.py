"""Read parquet files, and arrow files as `save_to_disk` of `datasets` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.arrow_tables import smaller_batches
from indictune.data.bad_rows import BadRows
from indictune.data.class_ids import declared_classes, named, names_by_value, record_with_names, with_names
from indictune.data.columns import check_schema, existing_columns, numbered_rows, text_batches
from indictune.data.packed_files import PACKED, kind_of_file, opened
from indictune.errors import UserError

ARROW_EXTENSIONS = (".parquet", ".arrow")


@contextmanager
def arrow_errors(source: str) -> Iterator[None]:
    """Name the source where Arrow cannot read it, or Python cannot hold a text or time."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError("rows-unreadable", value=source, reason=reason) from error


def arrow_batches(
    path: str,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
    lists: frozenset[str],
    chunk_rows: int,
) -> Iterator[pa.RecordBatch]:
    """The rows in the form of `read_batches`; class ids become the names that the file declares."""
    with arrow_errors(path), _arrow_file(path) as file:
        names = existing_columns(path, file.schema.names, columns, optional, bad)
        declared = declared_classes(file.schema)
        classes = {
            role: names_by_value(declared[name], path, may_be_names=False)
            for role, name in names.items()
            if name in declared and role != "text" and pa.types.is_integer(file.schema.field(name).type)
        }
        batches = file.batches(chunk_rows, list(dict.fromkeys(names.values())))
        listed = {name: declared[name] for role, name in names.items() if role in lists and name in declared}
        for batch in text_batches(_with_names_in_lists(batches, listed), names, optional, path, lists):
            for role, known in classes.items():
                batch = with_names(batch, role, known, bad)
            yield batch


def _with_names_in_lists(
    batches: Iterator[pa.RecordBatch], classes: Mapping[str, Sequence[str]]
) -> Iterator[pa.RecordBatch]:
    """Replace the class ids in columns of lists by names."""
    for batch in batches:
        for column, names in classes.items():
            if pa.types.is_list(batch[column].type):
                index, lists = batch.schema.get_field_index(column), batch[column].to_pylist()
                batch = batch.set_column(index, column, pa.array([named(row, names) for row in lists]))
        yield batch


def arrow_records(path: str, chunk_rows: int) -> Iterator[tuple[int, dict[str, object]]]:
    """The rows in the form of `read_records`; class ids become names, in lists too."""
    with arrow_errors(path), _arrow_file(path) as file:
        check_schema(path, file.schema)
        classes = declared_classes(file.schema)
        for number, record in numbered_rows(file.batches(chunk_rows)):
            yield number, record_with_names(record, classes)


@dataclass(frozen=True)
class _ArrowFile:
    schema: pa.Schema
    reader: Any  # of the file: `pq.ParquetFile`, or a reader of pa.ipc

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, at most so many at a time."""
        if isinstance(self.reader, pq.ParquetFile):
            yield from self.reader.iter_batches(rows, columns=columns)
        else:
            batches = (batch.select(columns) if columns else batch for batch in self.reader)
            yield from smaller_batches(batches, rows)


@contextmanager
def _arrow_file(path: str) -> Iterator[_ArrowFile]:
    if path.lower().endswith(PACKED):
        with opened(path) as packed:
            source: Any = pa.BufferReader(packed.read())
    else:
        source = pa.OSFile(path)
    with source:
        if kind_of_file(path) == ".parquet":
            with pq.ParquetFile(source, page_checksum_verification=True) as file:
                yield _ArrowFile(file.schema_arrow, file)
        else:
            reader = pa.ipc.open_stream(source)
            yield _ArrowFile(reader.schema, reader)
