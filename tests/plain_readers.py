"""Rows of a file as the standard library and Arrow read them, to compare ours with: in order, by column."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("text", "label", "language")
_HALF = re.compile("[\ud800-\udfff]")
_LONE_CR = re.compile("\r(?!\n)")


class Unreadable:
    """Stands for a row that is no value."""


def plain_records(path: Path) -> list[Any]:
    """The values of a file, those left out that are no values: of csv and tsv dictionaries of texts."""
    return [row for row in plain_rows(path) if row is not Unreadable]


def plain_rows(path: Path) -> list[Any]:
    """As above, with `Unreadable` for each row that is no value.

    Raises:
        ValueError: as a whole it is none of its kind; a RecursionError or an Arrow exception tells the same.
    """
    if path.suffix == ".parquet":
        return list(_of_parquet(pq.read_table(path)))
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    if path.suffix in (".csv", ".tsv"):
        return list(_delimited(text, "," if path.suffix == ".csv" else "\t"))
    if path.suffix == ".jsonl":
        return list(_of_lines(text))
    found = json.loads(text)
    return list(found["data"] if isinstance(found, dict) else found)


def _delimited(text: str, delimiter: str) -> Iterator[Any]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            if _LONE_CR.search(text):
                raise ValueError("behind a broken row a line may end there, or not") from None
            yield Unreadable
            continue
        if not header:
            header = [name.strip() for name in cells]
        elif cells:
            yield dict(zip(header, cells, strict=True)) if len(cells) == len(header) else Unreadable


def _of_lines(text: str) -> Iterator[Any]:
    for line in filter(str.strip, text.split("\n")):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            yield Unreadable


def _of_parquet(table: pa.Table) -> Iterator[Any]:
    for number in range(table.num_rows):
        try:
            yield {name: table.column(name)[number].as_py() for name in table.schema.names}
        except (ValueError, OverflowError):
            yield Unreadable


def may_end_elsewhere(path: Path) -> bool:
    """Whether a carriage return alone ends a row of a file for the standard library, but for ours spoils it."""
    return path.suffix in (".csv", ".tsv") and re.search(rb"\r(?!\n)", path.read_bytes()) is not None


def cells_of(record: Any) -> tuple[Any, ...] | None:
    """Text, label and language of a record; None where it holds none."""
    if not isinstance(record, dict) or any(isinstance(record.get(name), dict | list) for name in NAMES):
        return None
    return tuple(record.get(name) for name in NAMES)


def are_same(read: Sequence[Any], plain: Iterable[Any], is_all: bool) -> bool:
    """Whether what ours has read is what stands there: all of it, or without what was left out, in its order."""
    if is_all:
        plain = list(plain)
        return len(read) == len(plain) and all(map(is_same, read, plain))
    rest = iter(plain)
    return all(any(is_same(value, each) for each in rest) for value in read)


def is_same(read: Any, plain: Any) -> bool:
    """Whether a value is another, which ours may give as the text that it was written as."""
    if isinstance(plain, dict):
        return (
            isinstance(read, dict) and list(read) == list(plain) and are_same([*read.values()], plain.values(), True)
        )
    if isinstance(plain, list | tuple):
        return isinstance(read, list | tuple) and are_same(read, plain, True)
    if plain is None or plain != plain:  # NaN, which pandas writes for a missing value
        return read is None or read != read
    if isinstance(plain, bool):
        return read is plain or read == str(plain).lower()
    if isinstance(plain, int | float):
        return _is_number(read, plain)
    if isinstance(plain, str):
        return bool(read in (plain, _HALF.sub("\N{REPLACEMENT CHARACTER}", plain)))
    return bool(read in (plain, str(plain)))


def _is_number(read: Any, plain: float) -> bool:
    try:
        return not isinstance(read, bool) and type(plain)(read) == plain
    except (TypeError, ValueError):
        return False
