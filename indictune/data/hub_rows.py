"""Read the rows of a dataset's split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import LINES_PER_FILE, BadRows
from indictune.data.columns import check_columns, check_schema, shortened, text_batch, typed_rows
from indictune.data.hub_datasets import SplitFiles
from indictune.data.json_rows import holds_lines
from indictune.data.read_files import RECORD_EXTENSIONS, Record, read_batches, read_records
from indictune.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK_ROWS = 20_000

Item = TypeVar("Item")


def hub_batches(
    rows: Dataset | SplitFiles,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
    lists: Collection[str] = (),
) -> Iterator[pa.RecordBatch]:
    """The rows of a split in the form of `read_batches`; class ids become the names that the dataset declares.

    Args:
        rows: of the split.
        columns: as of `read_batches`, like `optional`. The json rows of a test split may lack the label.
        bad: gets the rows that cannot be used, and the files of the split, with lines `LINES_PER_FILE` apart.
        lists: as of `read_batches`.

    Raises:
        UserError: the split has no rows, a column is missing or holds neither text, numbers nor booleans.
    """
    if not isinstance(rows, SplitFiles):
        yield from _typed_batches(rows, columns, optional, bad, lists)
        return
    if rows.kind == "json" and rows.split == "test":
        optional = {**optional, "label": columns["label"]}
        columns = {role: name for role, name in columns.items() if role != "label"}
    names = {role: rows.class_names.get(name) for role, name in {**optional, **columns}.items()}
    class_names: dict[str, Mapping[str, str | None]] = {}
    if labels := names["label"]:
        class_names["label"] = _by_number_or_name(rows.split, labels)
    if languages := names.get("language"):
        class_names["language"] = _languages(languages)

    def read(file: str) -> Iterator[pa.RecordBatch]:
        for batch in read_batches(file, columns, optional, bad, _extension(file), lists):
            yield _with_class_names(batch, class_names, bad)

    for offset, batch in _read_files(rows, read, bad):
        lines = pc.add(batch["line"], offset)
        yield batch.set_column(batch.schema.get_field_index("line"), "line", lines)


def hub_records(rows: Dataset | SplitFiles, bad: BadRows) -> Iterator[Record]:
    """The rows of a split in the form of `read_records`.

    Args:
        rows: of the split.
        bad: gets the rows that cannot be read, and the files of the split, as of `hub_batches`.

    Raises:
        UserError: the split has no rows, or cannot be read.
    """
    if not isinstance(rows, SplitFiles):
        yield from _typed_records(rows, bad)
        return
    if rows.kind == "csv":
        raise UserError("chats-in-csv", value=rows.files[0], expected=", ".join(RECORD_EXTENSIONS))
    for offset, (line, record) in _read_files(rows, lambda file: read_records(file, bad, _extension(file)), bad):
        yield offset + line, record


def _read_files(rows: SplitFiles, read: Callable[[str], Iterator[Item]], bad: BadRows) -> Iterator[tuple[int, Item]]:
    """What `read` yields for all files, each with the number that its file adds to lines."""
    bad.files = rows.files
    for number, file in enumerate(rows.files):
        items = read(file)
        while True:
            with bad.reading(number):
                item = next(items, None)
            if item is None:
                break
            yield number * LINES_PER_FILE, item


def _extension(file: str) -> str:
    """The extension that says how to read a file. On the Hub, .json is often one object a line."""
    extension = Path(file).suffix.lower()
    if extension == ".ndjson" or (extension == ".json" and holds_lines(file)):
        return ".jsonl"
    return extension


def _typed_batches(
    rows: Dataset, columns: Mapping[str, str], optional: Mapping[str, str], bad: BadRows, lists: Collection[str]
) -> Iterator[pa.RecordBatch]:
    import datasets

    split = str(rows.split)
    check_columns(split, rows.column_names, columns)
    if not len(rows):
        raise UserError("no-rows", value=split)
    names = {**columns, **{role: name for role, name in optional.items() if name in rows.column_names}}
    kinds = {role: rows.features[name] for role, name in names.items()}
    class_names = {
        role: _by_number(split, kind.names) if role == "label" else _languages(kind.names)
        for role, kind in kinds.items()
        if role in ("label", "language") and isinstance(kind, datasets.ClassLabel)
    }
    first_row = 1
    for table in rows.select_columns(list(dict.fromkeys(names.values()))).with_format("arrow").iter(_CHUNK_ROWS):
        (read,) = table.combine_chunks().to_batches()
        batch = text_batch(read, names, list(optional), split, first_row, bad, lists)
        yield _with_class_names(batch, class_names, bad)
        first_row += read.num_rows


def _typed_records(rows: Dataset, bad: BadRows) -> Iterator[Record]:
    if not len(rows):
        raise UserError("no-rows", value=rows.split)
    first_row = 1
    for table in rows.with_format("arrow").iter(_CHUNK_ROWS):
        check_schema(str(rows.split), table.schema)
        (read,) = table.combine_chunks().to_batches()
        yield from typed_rows(read, first_row, bad)
        first_row += read.num_rows


def _by_number(split: str, names: Sequence[str]) -> dict[str, str | None]:
    """A label as it is written -> its class. The Hub marks a row without a label by -1.

    Raises:
        UserError: a name is no text, such as the `no` of YAML.
    """
    if other := [name for name in names if not isinstance(name, str)]:
        raise UserError("class-name-not-text", value=split, name=repr(other[0]))
    return {"-1": None, "": None} | {str(number): name for number, name in enumerate(names)}


def _by_number_or_name(split: str, names: Sequence[str]) -> dict[str, str | None]:
    """As `_by_number`, for files, which may have the names too.

    Raises:
        UserError: a name is no text, or is the number of another class: the file may mean either.
    """
    numbers = _by_number(split, names)
    if doubtful := [name for name in names if numbers.get(name, name) != name]:
        raise UserError("class-name-is-number", value=split, names=", ".join(map(shortened, doubtful[:5])))
    return numbers | {name: name for name in names}


def _languages(names: Sequence[str]) -> dict[str, str | None]:
    """A language's number, as it is written -> its name. Other values stay: the column may be unused."""
    return {"-1": None} | {str(number): name for number, name in enumerate(names) if isinstance(name, str)}


def _with_class_names(
    batch: pa.RecordBatch, class_names: Mapping[str, Mapping[str, str | None]], bad: BadRows
) -> pa.RecordBatch:
    """Replace numbers of classes by names, in the columns of labels and languages."""
    if known := class_names.get("language"):
        named = [known.get(language, language) for language in batch["language"].to_pylist()]
        batch = batch.set_column(batch.schema.get_field_index("language"), "language", pa.array(named, pa.string()))
    return _with_label_names(batch, class_names["label"], bad) if "label" in class_names else batch


def _with_label_names(batch: pa.RecordBatch, known: Mapping[str, str | None], bad: BadRows) -> pa.RecordBatch:
    """Replace numbers by names; a name stays as it is written. `bad` gets the rows with another label."""
    written = [label or "" for label in batch["label"].to_pylist()]
    labels = [label.strip() for label in written]
    good = [label in known for label in labels]
    for index in (index for index, is_good in enumerate(good) if not is_good):
        row = batch.slice(index, 1).to_pylist()[0]
        names = dict.fromkeys(name for name in known.values() if name is not None)
        expected = ", ".join(map(shortened, list(names)[:20]))
        bad.add(row.pop("line"), "label-undeclared", row, label=shortened(labels[index]), expected=expected)
    named = [
        as_is if known.get(label) == label else known.get(label) for as_is, label in zip(written, labels, strict=True)
    ]
    batch = batch.set_column(batch.schema.get_field_index("label"), "label", pa.array(named, pa.string()))
    return batch.filter(pa.array(good, pa.bool_()))
