"""Read the rows of a split: from its files, or from a `Dataset`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import LINES_PER_FILE, BadRows
from indictune.data.columns import check_schema, existing_columns, numbered_rows, shortened, text_batches
from indictune.data.hub_datasets import SplitFiles, SplitRows, class_names
from indictune.data.read_files import CHUNK_ROWS, Record, arrow_errors, read_batches, read_records
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_MAX_LISTED = 20


def split_batches(
    rows: SplitRows,
    bad: BadRows,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    lists: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`; class ids become the names that the dataset declares.

    Args:
        rows: of the split.
        bad: gets the rows that cannot be used, and the files of the split if it has several.
        columns: as of `read_batches`, like `optional`. The test split of a dataset may lack the label.
        optional: columns that may be missing.
        lists: as of `read_batches`.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    if str(rows.split) == "test":
        optional = {**optional, "label": columns["label"]}
        columns = {role: name for role, name in columns.items() if role != "label"}
    declared = class_names(rows)
    names = {role: declared[name] for role, name in {**optional, **columns}.items() if name in declared}
    classes = {role: _classes(rows, of_role) for role, of_role in names.items() if role != "text"}
    if isinstance(rows, SplitFiles):
        batches = _batches_of_files(rows, bad, columns, optional, lists)
    else:
        batches = _batches_of_dataset(rows, columns, optional, lists)
    for batch in batches:
        for role, known in classes.items():
            batch = _with_names(batch, role, known, bad)
        yield batch


def split_records(rows: SplitRows, bad: BadRows) -> Iterator[Record]:
    """The rows of a split in the form of `read_records`; arguments as of `split_batches`.

    Raises:
        UserError: the split has no rows, or cannot be read.
    """
    if isinstance(rows, SplitFiles):
        for file, offset in _numbered_files(rows, bad):
            for line, record in read_records(file, bad):
                yield offset + line, record
    else:
        check_schema(str(rows.split), rows.features.arrow_schema)
        with arrow_errors(str(rows.split)):
            yield from numbered_rows(_arrow_batches(rows))


def _numbered_files(rows: SplitFiles, bad: BadRows) -> Iterator[tuple[str, int]]:
    """Each file, with the number to add to its lines."""
    for file in rows.files:
        if len(rows.files) > 1:
            bad.files.append(file)
        yield file, len(bad.files) * LINES_PER_FILE


def _batches_of_files(
    rows: SplitFiles, bad: BadRows, columns: Mapping[str, str], optional: Mapping[str, str], lists: Collection[str]
) -> Iterator[pa.RecordBatch]:
    for file, offset in _numbered_files(rows, bad):
        for batch in read_batches(file, columns, optional, bad, lists):
            yield _with_column(batch, "line", pc.add(batch["line"], offset)) if offset else batch


def _batches_of_dataset(
    rows: Dataset, columns: Mapping[str, str], optional: Mapping[str, str], lists: Collection[str]
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


def _classes(rows: SplitRows, names: Sequence[str]) -> dict[str, str | None]:
    """A value as it is written -> the name of its class; None where the Hub writes -1. Files may have the names too.

    Raises:
        UserError: a name is no text, such as the `no` of YAML, or files may mean two classes by it.
    """
    known: dict[str, str | None] = {name: name for name in names} | {"-1": None, "": None}
    known |= {str(number): name for number, name in enumerate(names)}
    unclear = [name for name in names if not isinstance(name, str)]
    if isinstance(rows, SplitFiles):
        unclear += [name for name in names if known[name] != name]
    if unclear:
        raise UserError("class-names-unclear", value=rows.split, names=", ".join(map(repr, unclear[:_MAX_LISTED])))
    return known


def _with_names(batch: pa.RecordBatch, role: str, known: Mapping[str, str | None], bad: BadRows) -> pa.RecordBatch:
    """Replace numbers of classes by names. `bad` gets the rows with another value."""
    values = [(value or "").strip() for value in batch[role].to_pylist()]
    good = [value in known for value in values]
    for index in (index for index, is_good in enumerate(good) if not is_good):
        (row,) = batch.slice(index, 1).to_pylist()
        expected = ", ".join(list(dict.fromkeys(shortened(name) for name in known.values() if name))[:_MAX_LISTED])
        bad.add(row.pop("line"), "class-undeclared", row, role=role, name=shortened(values[index]), expected=expected)
    named = pa.array([known.get(value) for value in values], pa.string())
    return _with_column(batch, role, named).filter(pa.array(good, pa.bool_()))


def _with_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), name, column)
