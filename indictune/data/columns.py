"""Check names and types of columns, and read their values as text, whatever kind of file they come from."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import BadRows
from indictune.errors import Problem, Problems, UserError, problem

SEPARATOR = "|"  # of the labels of one row
_MAX_SHOWN = 30
_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_DECIMAL = re.compile(r"(-?\d+)\.(\d*)")

Fault = tuple[str, dict[str, Any]]  # code and details of a problem


def normalise_label(label: str | None) -> str | None:
    """`plain_label`, with one spelling for each number: 0.50 is `0.5`, "1." is `1`. None for an empty label."""
    label = plain_label(label)
    if label and (decimal := _DECIMAL.fullmatch(label)):
        whole, fraction = decimal[1], decimal[2].rstrip("0")
        label = f"{whole}.{fraction}" if fraction else whole
    return "0" if label == "-0" else label


def plain_label(label: str | None) -> str | None:
    """A label without what file types add to it; None for an empty one.

    1, 1.0 and "1" are `1`; True and TRUE (pandas writes booleans so to csv) are `true`. Other labels keep their case
    and spelling in NFC, without spaces around them: "Positive" and "positive" are two labels.
    """
    if label is None or not (label := unicodedata.normalize("NFC", label.strip())):
        return None
    if label.lower() in ("true", "false"):
        return label.lower()
    return label.removesuffix(".0") if _DECIMAL.fullmatch(label) else label


def joined_list(value: object) -> object:
    """A list of labels as `a|b`, an empty one as `|`; anything else as it is."""
    if not isinstance(value, list) or any(isinstance(each, list | dict) for each in value):
        return value
    return SEPARATOR.join(map(str, value)) or SEPARATOR


def check_columns(path: str, present: Collection[str], columns: Mapping[str, str]) -> None:
    """Check that each wanted column exists once.

    Args:
        path: of the file, or name of the split.
        present: names of all columns.
        columns: role ("text", "label", "language") -> name of its column.

    Raises:
        UserError: one problem for every column that is missing or duplicate.
    """
    problems = Problems()
    names = list(present)
    for role, name in columns.items():
        problems += _duplicates(path, names, name)
        if name not in names:
            near = difflib.get_close_matches(name.lower(), [other.lower() for other in names], n=1, cutoff=0.6)
            hint = next((f"Did you mean {shortened(other)}?" for other in names if other.lower() in near), None)
            shown = ", ".join(map(shortened, names)) or "no columns"
            details: dict[str, Any] = {"column": shortened(name), "role": role, "columns": shown}
            problems.append(problem("column-missing", value=path, way_out=hint, **details))
    problems.raise_any()


def check_schema(path: str, schema: pa.Schema) -> None:
    """Refuse duplicate columns, and columns of type JSON.

    A row keeps the last of two columns of one name. `datasets` 5 makes JSON columns of mixed values, with each text in
    quotes.

    Raises:
        UserError: one problem for every such column.
    """
    problems = Problems()
    for name in dict.fromkeys(schema.names):
        problems += _duplicates(path, schema.names, name)
    for field in schema:
        if "arrow.json" in str(field.type):
            problems.append(problem("column-json", value=path, column=shortened(field.name), type=field.type))
    problems.raise_any()


def _duplicates(path: str, names: list[str], name: str) -> list[Problem]:
    count = names.count(name)
    return [problem("column-duplicate", value=path, count=count, column=shortened(name))] if count > 1 else []


def text_batch(
    read: pa.RecordBatch,
    names: Mapping[str, str],
    optional: Collection[str],
    path: str,
    first_row: int,
    bad: BadRows,
    lists: Collection[str] = (),
) -> pa.RecordBatch:
    """Arrow rows in the form that `read_batches` yields.

    Args:
        read: rows that have the columns named.
        names: role -> name of its column.
        optional: roles that get a column of nulls if `names` lacks them.
        path: of the file, or name of the split.
        first_row: number of the first row in its file or split, from 1.
        bad: gets the rows with strings that are not UTF-8.
        lists: names of columns that may hold lists, which are joined by `joined_list`.

    Raises:
        UserError: one problem for every column that holds neither text, numbers nor booleans.
    """
    lines = pa.array(range(first_row, first_row + read.num_rows), pa.int64())
    readable = _readable(read.select(list(dict.fromkeys(names.values()))), first_row, bad)
    if readable is not None:
        read, lines = read.filter(readable), lines.filter(readable)
    problems = Problems()
    arrays: dict[str, pa.Array] = {role: pa.nulls(read.num_rows, pa.string()) for role in (*names, *optional)}
    for role, name in names.items():
        with problems.collecting():
            column = read.column(name)
            if name in lists and pa.types.is_nested(column.type):
                column = pa.array(map(joined_list, column.to_pylist()), pa.string())
            arrays[role] = _as_text(column, path, name)
    problems.raise_any()
    arrays["line"] = lines
    return pa.record_batch(list(arrays.values()), names=list(arrays))


def typed_rows(read: pa.RecordBatch, first_row: int, bad: BadRows) -> Iterator[tuple[int, dict[str, object]]]:
    """Arrow rows in the form that `read_records` yields.

    Args:
        read: rows.
        first_row: number of the first row in its file or split, from 1.
        bad: gets the rows with strings that are not UTF-8, or times beyond those of Python.
    """
    try:
        rows: list[dict[str, object]] = read.to_pylist()
    except (ValueError, OverflowError):
        for number in range(read.num_rows):
            row, fault = _python_row(read, number)
            if fault:
                bad.add_broken(first_row + number, fault[0], row, **fault[1])
            else:
                yield first_row + number, row
    else:
        yield from enumerate(rows, first_row)


def _readable(read: pa.RecordBatch, first_row: int, bad: BadRows) -> pa.BooleanArray | None:
    """Which rows hold only UTF-8 strings, or None if all do; `bad` gets the others."""
    try:
        for column in read.columns:
            column.validate(full=True)
        return None
    except pa.ArrowInvalid:
        rows = [_python_row(read, number) for number in range(read.num_rows)]
    for number, (row, fault) in enumerate(rows, first_row):
        if fault:
            bad.add_broken(number, fault[0], row, **fault[1])
    return pa.array([fault is None for _, fault in rows], pa.bool_())


def _python_row(read: pa.RecordBatch, number: int) -> tuple[dict[str, object], Fault | None]:
    """A row without the values that Python cannot hold, and what is wrong with one of them."""
    row: dict[str, object] = {}
    fault: Fault | None = None
    for name in read.schema.names:
        try:
            row[name] = read.column(name)[number].as_py()
        except UnicodeDecodeError as error:
            byte = f"0x{error.object[error.start]:02x}"
            fault = "not-utf8", {"where": f"column {shortened(name)}: ", "byte": byte}
        except (ValueError, OverflowError) as error:
            fault = "value-unreadable", {"column": shortened(name), "reason": error}
    return row, fault


def _as_text(column: pa.Array, path: str, name: str) -> pa.Array:
    """A column of strings, numbers or booleans, dictionary-encoded or not, as nullable strings; NaN becomes null.

    Raises:
        UserError: the column holds something else.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_extension = isinstance(kind, pa.BaseExtensionType)  # such as JSON, with each text in quotes
    if is_extension or pa.types.is_nested(kind) or any(is_bytes(kind) for is_bytes in _BYTES):
        raise UserError("column-type", value=path, column=name, type=kind)
    try:
        column = column.cast(kind)
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        text = column.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError("column-unreadable", value=path, column=name, type=kind, reason=reason) from error
    return text


def shortened(name: str) -> str:
    """At most 30 characters for a message: without a header line, a tweet may stand for a column name."""
    return name if len(name) <= _MAX_SHOWN else name[: _MAX_SHOWN - 1] + "…"
