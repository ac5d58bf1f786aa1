"""Read parquet and arrow files, and replace class ids by the names that the schema declares."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.bad_rows import BadRows, Batches, Record
from indictune.data.cache import smaller_batches, with_column
from indictune.data.columns import Wanted, check_schema, existing_columns, shortened, text_batches
from indictune.data.read.open_files import opened
from indictune.errors import UserError
from indictune.files import PACKED, kind_of_file

Classes = Mapping[str, Sequence[str]]  # column -> names of its classes 0, 1, ...
_MAX_LISTED = 20


def _declared_classes(schema: pa.Schema) -> Classes:
    """The classes that `datasets` declares in parquet and arrow files, also those of columns of lists."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {name: kind.get("feature", kind) for name, kind in features.items()}
        return {name: kind["names"] for name, kind in kinds.items() if kind["_type"] == "ClassLabel"}
    except (KeyError, TypeError, ValueError, AttributeError):  # written by something else
        return {}


def with_class_names(
    batches: Batches, roles: Mapping[str, str], classes: Classes, source: str, bad: BadRows, may_be_names: bool = False
) -> Batches:
    """Replace class ids by names in the columns of `roles`; `bad` gets the rows with a value that is no class.

    The values `may_be_names` too in files of text. Raises `UserError` if a name is no text, such as the `no` of YAML,
    or files may mean two classes by it.
    """
    given = {role: classes[name] for role, name in roles.items() if not role.startswith("text") and name in classes}
    of_roles = {role: _names_by_value(names, source, may_be_names) for role, names in given.items()}
    for batch in batches:
        for role, known in of_roles.items():
            batch = _with_names(batch, role, known, bad)
        yield batch


def _names_by_value(names: Sequence[str], source: str, may_be_names: bool) -> dict[str, str | None]:
    """A value as it is written -> the name of its class; None where the Hub writes -1."""
    known: dict[str, str | None] = {name: name for name in names} | {"-1": None, "": None}
    known |= {str(number): name for number, name in enumerate(names)}
    unclear = [name for name in names if not isinstance(name, str)]
    if may_be_names:
        unclear += [name for name in names if known[name] != name]
    if unclear:
        raise UserError("class-names-unclear", value=source, names=", ".join(map(repr, unclear[:_MAX_LISTED])))
    return known


def _with_names(batch: pa.RecordBatch, role: str, known: Mapping[str, str | None], bad: BadRows) -> pa.RecordBatch:
    values = [(value or "").strip() for value in batch[role].to_pylist()]
    good = [value in known for value in values]
    for index in (index for index, is_good in enumerate(good) if not is_good):
        (row,) = batch.slice(index, 1).to_pylist()
        expected = ", ".join(list(dict.fromkeys(shortened(name) for name in known.values() if name))[:_MAX_LISTED])
        bad.add(row.pop("line"), "class-undeclared", row, role=role, name=shortened(values[index]), expected=expected)
    named = pa.array([known.get(value) for value in values], pa.string())
    return with_column(batch, role, named).filter(pa.array(good, pa.bool_()))


def _named_class(value: Any, names: Sequence[str]) -> Any:
    """The name of a class id, or a list of them; an id without a name stays."""
    if isinstance(value, list):
        return [_named_class(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


ARROW_EXTENSIONS = (".parquet", ".arrow")
_BatchesOf = Callable[[int, list[str] | None], Batches]


@contextmanager
def arrow_errors(source: str) -> Iterator[None]:
    """Name the source where Arrow cannot read it, or Python cannot hold a text or time."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError("rows-unreadable", value=source, reason=reason) from error


def arrow_batches(path: str, wanted: Wanted, bad: BadRows, chunk_rows: int) -> Batches:
    """The rows in the form of `read_batches`; class ids become the names that the file declares."""
    with arrow_errors(path), _arrow_file(path) as (schema, batches_of):
        names = existing_columns(path, schema.names, wanted, bad)
        stored = batches_of(chunk_rows, list(dict.fromkeys(names.values())))
        yield from named_batches(path, schema, stored, names, wanted, bad)


def named_batches(
    source: str, schema: pa.Schema, stored: Batches, names: Mapping[str, str], wanted: Wanted, bad: BadRows
) -> Batches:
    """Arrow rows of a file or split in the form of `read_batches`; class ids become names, in lists too."""
    declared = _declared_classes(schema)
    of_ids = {name: declared[name] for name in declared if pa.types.is_integer(schema.field(name).type)}
    listed = {name: declared[name] for role, name in names.items() if role in wanted.lists and name in declared}
    texts = text_batches(_with_names_in_lists(stored, listed), names, wanted, source)
    return with_class_names(texts, names, of_ids, source, bad)


def _with_names_in_lists(batches: Batches, classes: Classes) -> Batches:
    for batch in batches:
        for column, names in classes.items():
            if pa.types.is_list(batch[column].type):
                named = [_named_class(row, names) for row in batch[column].to_pylist()]
                batch = with_column(batch, column, pa.array(named))
        yield batch


def arrow_records(path: str, chunk_rows: int) -> Iterator[Record]:
    """The rows in the form of `read_records`; class ids become names, in lists too."""
    with arrow_errors(path), _arrow_file(path) as (schema, batches_of):
        yield from named_records(path, schema, batches_of(chunk_rows, None))


def named_records(source: str, schema: pa.Schema, batches: Batches) -> Iterator[Record]:
    """All arrow rows of a file or split in the form of `read_records`; class ids become names, in lists too."""
    check_schema(source, schema)
    classes = _declared_classes(schema)
    for number, record in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
        yield number, {column: _named_class(value, classes.get(column, ())) for column, value in record.items()}


@contextmanager
def _arrow_file(path: str) -> Iterator[tuple[pa.Schema, _BatchesOf]]:
    """The schema of a file, and a function that yields so many rows of it at a time, with some columns or all."""
    if path.lower().endswith(PACKED):
        with opened(path) as packed:
            source: Any = pa.BufferReader(packed.read())
    else:
        source = pa.OSFile(path)
    with source:
        if kind_of_file(path) == ".parquet":
            with pq.ParquetFile(source, page_checksum_verification=True) as file:
                yield file.schema_arrow, lambda rows, columns: file.iter_batches(rows, columns=columns)
        else:
            reader = pa.ipc.open_stream(source)

            def batches_of(rows: int, columns: list[str] | None) -> Batches:
                return smaller_batches((batch.select(columns) if columns else batch for batch in reader), rows)

            yield reader.schema, batches_of
