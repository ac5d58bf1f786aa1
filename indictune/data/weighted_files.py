"""Read the entries of `--train_files`: files, and the weight and the language of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.bad_rows import LINES_PER_FILE
from indictune.data.file_names import files_named
from indictune.errors import Problems, UserError

FLAG = "--train_files"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Entry:
    """Some files of training rows.

    Attributes:
        path: a file, a pattern, or a folder of a saved dataset.
        weight: how often each of their rows comes in an epoch, before languages are balanced.
        language: of rows that name none; None detects it.
        files: that the path stands for.
    """

    path: str
    weight: float = 1.0
    language: str | None = None
    files: tuple[str, ...] = ()


def entries_of(words: Sequence[str]) -> tuple[Entry, ...]:
    """The entries, each written as a path, or as JSON: `{"path": "a.csv", "weight": 2, "language": "hi"}`.

    Raises:
        UserError: all problems of all entries.
    """
    problems, found, taken = Problems(), [], set[str]()
    for word in words:
        with problems.collecting():
            entry = _entry(word)
            if again := taken.intersection(entry.files):
                raise UserError("file-in-two-entries", FLAG, min(again))
            taken.update(entry.files)
            found.append(entry)
    problems.raise_any()
    return tuple(found)


def _entry(word: str) -> Entry:
    given = _keys(word) if word.lstrip().startswith("{") else {"path": word}
    path, weight, language = given.get("path"), given.get("weight", 1), given.get("language")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < float("inf")
    named = [isinstance(path, str) and path, is_number, language is None or (isinstance(language, str) and language)]
    if given.keys() - {"path", "weight", "language"} or not all(named):
        raise UserError("train-files-entry", FLAG, word)
    assert isinstance(path, str)
    return Entry(path, float(weight), language, files_named(path, "train")[1])


def _keys(word: str) -> dict[str, Any]:
    try:
        return dict(json.loads(word))
    except ValueError as error:
        raise UserError("train-files-entry", FLAG, word) from error


def entry_numbers(lines: pa.ChunkedArray, entries: Sequence[Entry]) -> np.ndarray:
    """The number of each row's entry, int64 [rows], from the `line` of a `StoredRows`."""
    by_file = np.repeat(np.arange(len(entries)), [len(entry.files) for entry in entries])
    file = np.maximum(lines.to_numpy() // LINES_PER_FILE - 1, 0)
    return cast(np.ndarray, by_file[file])


def with_languages(items: Callable[..., Iterator[Item]], entries: Sequence[Entry]) -> Callable[..., Iterator[Item]]:
    """The same reader; rows without a language get that of their entry."""
    languages = [entry.language for entry in entries for _ in entry.files]

    def read(*args: Any) -> Iterator[Item]:
        for item in items(*args):
            yield cast(Item, _batch(item, languages) if isinstance(item, pa.RecordBatch) else _record(item, languages))

    return read if any(languages) else items


def _batch(batch: pa.RecordBatch, languages: Sequence[str | None]) -> pa.RecordBatch:
    files = np.maximum(batch["line"].to_numpy() // LINES_PER_FILE - 1, 0)
    of_entry = pa.array(languages, pa.string()).take(pa.array(files))
    given = batch["language"]
    is_named = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(given), ""), False)
    column = batch.schema.get_field_index("language")
    return batch.set_column(column, "language", pc.if_else(is_named, given, of_entry))


def _record(item: Any, languages: Sequence[str | None]) -> tuple[int, dict[str, object]]:
    line, record = item
    language = languages[max(line // LINES_PER_FILE - 1, 0)]
    return (line, record) if record.get("language") or language is None else (line, {**record, "language": language})
