"""Read the rows of a split: from its files, or from a `Dataset`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.arrow_files import arrow_errors
from indictune.data.bad_rows import BadRows, numbered_files
from indictune.data.class_ids import names_by_value, with_names
from indictune.data.columns import check_schema, existing_columns, numbered_rows, text_batches
from indictune.data.file_form import STANDARD, FileForm
from indictune.data.hub_datasets import SplitFiles, SplitRows, class_names
from indictune.data.read_files import CHUNK_ROWS, Record, read_batches, read_records
from indictune.errors import Problems, UserError, problem

if TYPE_CHECKING:
    from datasets import Dataset


def split_batches(
    rows: SplitRows,
    bad: BadRows,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    lists: frozenset[str] = frozenset(),
    form: FileForm = STANDARD,
) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`; class ids become the names that the dataset declares.

    Args:
        rows: of the split.
        bad: gets the rows that cannot be used, and the files of the split if it has several.
        columns: as of `read_batches`, like `optional`. The test split of a dataset may lack the label.
        optional: columns that may be missing.
        lists: as of `read_batches`, like `form`.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    if str(rows.split) == "test":
        optional = {**optional, "label": columns["label"]}
        columns = {role: name for role, name in columns.items() if role != "label"}
    declared = class_names(rows)
    names = {role: declared[name] for role, name in {**optional, **columns}.items() if name in declared}
    are_files = isinstance(rows, SplitFiles)
    classes = {
        role: names_by_value(of_role, str(rows.split), are_files) for role, of_role in names.items() if role != "text"
    }
    if isinstance(rows, SplitFiles):
        batches = _batches_of_files(rows, bad, columns, optional, lists, form)
    else:
        batches = _batches_of_dataset(rows, columns, optional, lists)
    for batch in batches:
        for role, known in classes.items():
            batch = with_names(batch, role, known, bad)
        yield batch


def split_records(rows: SplitRows, bad: BadRows) -> Iterator[Record]:
    """The rows of a split in the form of `read_records`; arguments as of `split_batches`.

    Raises:
        UserError: the split has no rows, or cannot be read.
    """
    if isinstance(rows, SplitFiles):
        for file, offset in numbered_files(rows.files, bad):
            for line, record in read_records(file, bad):
                yield offset + line, record
    else:
        check_schema(str(rows.split), rows.features.arrow_schema)
        with arrow_errors(str(rows.split)):
            yield from numbered_rows(_arrow_batches(rows))


def _batches_of_files(
    rows: SplitFiles,
    bad: BadRows,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    lists: frozenset[str],
    form: FileForm,
) -> Iterator[pa.RecordBatch]:
    problems = Problems()
    for file, offset in numbered_files(rows.files, bad):
        with problems.collecting():
            for batch in read_batches(file, columns, optional, bad, lists, form):
                yield _with_column(batch, "line", pc.add(batch["line"], offset)) if offset else batch
    missing = [str(each.value) for each in problems if each.code == "column-missing"]
    if missing and (others := {*rows.files} - {str(each.value) for each in problems}):
        problems.append(problem("files-differ", value=missing[0], other=min(others)))
    problems.raise_any()


def _batches_of_dataset(
    rows: Dataset, columns: Mapping[str, str], optional: Mapping[str, str], lists: frozenset[str]
) -> Iterator[pa.RecordBatch]:
    split = str(rows.split)
    names = existing_columns(split, rows.column_names, columns, optional)
    batches = _arrow_batches(rows.select_columns(list(dict.fromkeys(names.values()))))
    yield from text_batches(batches, names, optional, split, lists)


def _arrow_batches(rows: Dataset) -> Iterator[pa.RecordBatch]:
    if not len(rows):
        raise UserError("no-rows", value=rows.split)
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from table.combine_chunks().to_batches()


def _with_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), name, column)
