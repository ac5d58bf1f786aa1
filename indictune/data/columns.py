"""What the columns of a table may be called and hold, whatever kind of file or dataset they come from."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import BadRows
from indictune.errors import Problems, UserError

_MAX_SHOWN = 30
_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_DECIMAL = re.compile(r"(-?\d+)\.(\d*)")


def normalise_label(label: str | None) -> str | None:
    """One spelling of a label, whatever file type it came from; None for an empty one.

    That of `plain_label`, and a number's: 0.50 is `0.5`, "1." is `1`.
    """
    label = plain_label(label)
    if label and (decimal := _DECIMAL.fullmatch(label)):
        whole, fraction = decimal[1], decimal[2].rstrip("0")
        label = f"{whole}.{fraction}" if fraction else whole
    return "0" if label == "-0" else label


def plain_label(label: str | None) -> str | None:
    """A label without what file types add to it; None for an empty one.

    1, 1.0 and "1" are `1`; True and TRUE (pandas writes booleans so to csv) are `true`. Everything else keeps its case
    and spelling in NFC, without spaces around it: "Positive" and "positive" are two labels.
    """
    if label is None or not (label := unicodedata.normalize("NFC", label.strip())):
        return None
    if label.lower() in ("true", "false"):
        return label.lower()
    return label.removesuffix(".0") if _DECIMAL.fullmatch(label) else label


def check_columns(path: str, present: Collection[str], columns: Mapping[str, str]) -> None:
    """Check that each wanted column is there, once.

    Args:
        path: what messages begin with.
        present: names of all columns.
        columns: role ("text", "label", "language") -> name of its column; messages name the flag `--<role>_column`.

    Raises:
        UserError: one problem for every column that is missing or there twice.
    """
    problems = Problems()
    names = list(present)
    shown = ", ".join(map(shortened, names)) or "no columns"
    for role, name in columns.items():
        problems += _twice(path, names, name)
        if name not in names:
            near = difflib.get_close_matches(name.lower(), [other.lower() for other in names], n=1, cutoff=0.6)
            meant = next((f" Did you mean {shortened(other)}?" for other in names if other.lower() in near), "")
            problems.append(f"{path}: no column {shortened(name)} (--{role}_column); it has {shown}.{meant}")
    problems.raise_any()


def _twice(path: str, names: list[str], name: str) -> list[str]:
    count = names.count(name)
    return [f"{path}: {count} columns are called {shortened(name)}; rename all but one."] if count > 1 else []


def text_batch(
    read: pa.RecordBatch, names: Mapping[str, str], optional: Collection[str], where: str, first_row: int, bad: BadRows
) -> pa.RecordBatch:
    """Arrow rows in the form that `read_batches` yields.

    Args:
        read: rows that have the columns named.
        names: role -> name of its column.
        optional: roles that get a column of nulls where `names` has none for them.
        where: what messages begin with.
        first_row: number of the first row in its file or split, from 1.
        bad: gets the rows of which a string is no UTF-8.

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
            arrays[role] = _as_text(read.column(name), f"{where}: column {name}")
    problems.raise_any()
    arrays["line"] = lines
    return pa.record_batch(list(arrays.values()), names=list(arrays))


def typed_rows(read: pa.RecordBatch, first_row: int, bad: BadRows) -> Iterator[tuple[int, dict[str, object]]]:
    """Arrow rows in the form that `read_records` yields.

    Args:
        read: rows.
        first_row: number of the first row in its file or split, from 1.
        bad: gets the rows with strings that are no UTF-8, or times beyond those of Python.
    """
    try:
        rows: list[dict[str, object]] = read.to_pylist()
    except (ValueError, OverflowError):
        for number in range(read.num_rows):
            row, wrong = _row(read, number)
            if wrong:
                bad.add_broken(first_row + number, wrong, row)
            else:
                yield first_row + number, row
    else:
        yield from enumerate(rows, first_row)


def _readable(read: pa.RecordBatch, first_row: int, bad: BadRows) -> pa.BooleanArray | None:
    """Which rows have strings that all are UTF-8, or None where all have; `bad` gets the others."""
    try:
        for column in read.columns:
            column.validate(full=True)
        return None
    except pa.ArrowInvalid:
        rows = [_row(read, number) for number in range(read.num_rows)]
    for number, (row, wrong) in enumerate(rows, first_row):
        if wrong:
            bad.add_broken(number, wrong, row)
    return pa.array([wrong is None for _, wrong in rows], pa.bool_())


def _row(read: pa.RecordBatch, number: int) -> tuple[dict[str, object], str | None]:
    """A row without the values that Python cannot hold, and what is wrong with one of these."""
    row: dict[str, object] = {}
    wrong = None
    for name in read.schema.names:
        try:
            row[name] = read.column(name)[number].as_py()
        except UnicodeDecodeError as error:
            wrong = f"column {shortened(name)}: byte 0x{error.object[error.start]:02x} is no UTF-8 text."
        except (ValueError, OverflowError) as error:
            wrong = f"column {shortened(name)}: {error}."
    return row, wrong


def _as_text(column: pa.Array, where: str) -> pa.Array:
    """A column of strings, numbers or booleans, dictionary-encoded or not, as nullable strings; NaN becomes null.

    Raises:
        UserError: the column holds something else; the message begins with `where`.
    """
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_extension = isinstance(kind, pa.BaseExtensionType)  # such as JSON, in which a text is in quotes
    if is_extension or pa.types.is_nested(kind) or any(is_bytes(kind) for is_bytes in _BYTES):
        raise UserError(f"{where} holds {kind}, expected text, numbers or booleans.")
    try:
        column = column.cast(kind)
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        text = column.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowException as error:
        raise UserError(f"{where} holds {kind} that cannot be read as text ({str(error).splitlines()[0]}).") from error
    return text


def check_schema(where: str, schema: pa.Schema) -> None:
    """Refuse columns of one name, of which a row keeps the last, and columns of JSON, as `datasets` 5 makes them where
    the values of rows differ in kind: each text is in quotes.

    Raises:
        UserError: one problem for every such column; each begins with `where`.
    """
    problems = Problems()
    for name in dict.fromkeys(schema.names):
        problems += _twice(where, schema.names, name)
    for field in schema:
        if "arrow.json" in str(field.type):
            problems.append(
                f"{where}: column {shortened(field.name)} holds {field.type}, texts written as JSON, in quotes. Make "
                "it anew from its source with texts alone, or leave it out."
            )
    problems.raise_any()


def shortened(name: str) -> str:
    """At most 30 characters for a message: without a header line, a tweet stands where a column name should."""
    return name if len(name) <= _MAX_SHOWN else name[: _MAX_SHOWN - 1] + "…"
