"""Replace class ids by the names that a dataset, or the schema of a file, declares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from indictune.data.bad_rows import BadRows
from indictune.data.columns import shortened
from indictune.errors import UserError

_MAX_LISTED = 20


def declared_classes(schema: pa.Schema) -> dict[str, list[str]]:
    """Column -> names of its classes 0, 1, ..., as `datasets` writes them to parquet and arrow files.

    A column of lists of class ids has them too.
    """
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        kinds = {name: kind.get("feature", kind) for name, kind in features.items()}
        return {name: kind["names"] for name, kind in kinds.items() if kind["_type"] == "ClassLabel"}
    except (KeyError, TypeError, ValueError, AttributeError):  # written by something else
        return {}


def names_by_value(names: Sequence[str], source: str, may_be_names: bool) -> dict[str, str | None]:
    """A value as it is written -> the name of its class; None where the Hub writes -1.

    Args:
        names: of the classes 0, 1, ...
        source: file or split, for messages.
        may_be_names: whether the values may also be names, as in files of text.

    Raises:
        UserError: a name is no text, such as the `no` of YAML, or files may mean two classes by it.
    """
    known: dict[str, str | None] = {name: name for name in names} | {"-1": None, "": None}
    known |= {str(number): name for number, name in enumerate(names)}
    unclear = [name for name in names if not isinstance(name, str)]
    if may_be_names:
        unclear += [name for name in names if known[name] != name]
    if unclear:
        raise UserError("class-names-unclear", value=source, names=", ".join(map(repr, unclear[:_MAX_LISTED])))
    return known


def with_names(batch: pa.RecordBatch, role: str, known: Mapping[str, str | None], bad: BadRows) -> pa.RecordBatch:
    """Replace the values of a column by names, as of `names_by_value`. `bad` gets the rows with another value."""
    values = [(value or "").strip() for value in batch[role].to_pylist()]
    good = [value in known for value in values]
    for index in (index for index, is_good in enumerate(good) if not is_good):
        (row,) = batch.slice(index, 1).to_pylist()
        expected = ", ".join(list(dict.fromkeys(shortened(name) for name in known.values() if name))[:_MAX_LISTED])
        bad.add(row.pop("line"), "class-undeclared", row, role=role, name=shortened(values[index]), expected=expected)
    named = pa.array([known.get(value) for value in values], pa.string())
    return batch.set_column(batch.schema.get_field_index(role), role, named).filter(pa.array(good, pa.bool_()))


def record_with_names(record: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A row with names for class ids, as of `named`."""
    return record | {column: named(record[column], names) for column, names in classes.items() if column in record}


def named(value: Any, names: Sequence[str]) -> Any:
    """The name of a class id, or a list of them; an id without a name stays."""
    if isinstance(value, list):
        return [named(each, names) for each in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value
