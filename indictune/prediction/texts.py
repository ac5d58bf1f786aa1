"""Read the texts to label, in windows that are sorted by length and computed together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import cast

import pyarrow as pa

from indictune.config.shared_arguments import TextFileArguments
from indictune.data.bad_rows import BadRows
from indictune.data.columns import KEPT
from indictune.data.read.file_form import STANDARD, FileForm, decoded, form_of
from indictune.data.read.open_files import kind_of_file, opened
from indictune.data.read.read_files import checked_extension, read_batches
from indictune.errors import UserError, attributed_to
from indictune.prediction.labelled_rows import SCORE, text_batch
from indictune.prediction.served_classifier import Reading

# Enough to sort by length, and few enough that a killed command repeats seconds of work.
WINDOW_ROWS = 4_096
LINES = ".txt"
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class TextFile:
    """A file of texts.

    Attributes:
        path: as the user named it.
        columns: role -> name of a column that the file must have.
        optional: the same for columns that may be missing.
        form: of csv and tsv files.
    """

    path: str
    columns: Mapping[str, str]
    optional: Mapping[str, str]
    form: FileForm = STANDARD

    def windows(self, bad: BadRows) -> Iterator[pa.RecordBatch]:
        """All texts, as columns `text`, `language` and the kept ones; `bad` gets the unreadable rows.

        Raises:
            UserError: the file cannot be read, or lacks a column.
        """
        with attributed_to("--input_file"):
            if kind_of_file(self.path) == LINES:
                checked_extension(self.path)
                with opened(self.path) as file:
                    yield from equal_windows(line_windows(cast(BufferedReader, file), self.path), WINDOW_ROWS)
            else:
                batches = read_batches(self.path, self.columns, self.optional, bad, form=self.form)
                yield from map(_named, equal_windows(batches, WINDOW_ROWS))


def text_file(asked: TextFileArguments, reading: Reading) -> TextFile:
    """The file of `--input_file`, with the columns that the flags and the training name."""
    columns = {"text": asked.text_column or reading.text_column}
    columns |= {f"{KEPT}{name}": name for name in asked.keep_columns}
    # A column that only the training had may be missing here.
    language = {"language": asked.language_column or reading.language_column or "language"}
    is_asked = asked.language_column is not None
    required = columns | (language if is_asked else {})
    return TextFile(str(asked.input_file), required, {} if is_asked else language, form_of(asked))


def _named(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns by the names that the output gives them, without the lines."""
    names = [name for name in batch.schema.names if name != "line"]
    return batch.select(names).rename_columns([_name_of(role) for role in names])


def _name_of(role: str) -> str:
    """The name of a column in the output, where a kept one may not hide a label or a score."""
    name = role.removeprefix(KEPT)
    is_taken = name in ("text", "label", "language") or name.startswith(SCORE)
    return f"input_{name}" if is_taken and role != name else name


def equal_windows(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows, `rows` at a time, however the reader cuts them."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        while batch.num_rows:
            taken = batch.slice(0, rows - count)
            waiting.append(taken)
            count += taken.num_rows
            batch = batch.slice(taken.num_rows)
            if count == rows:
                yield pa.concat_batches(waiting)
                waiting, count = [], 0
    if waiting:
        yield pa.concat_batches(waiting)


def line_windows(stream: BufferedReader, name: str) -> Iterator[pa.RecordBatch]:
    """The lines of a stream as texts. A window has what could be read at once, so that a slow writer gets answers.

    Raises:
        UserError: a line is no UTF-8.
    """
    rest, number = b"", 1
    while chunk := stream.read1(_CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for start in range(0, len(lines), WINDOW_ROWS):
            some = lines[start : start + WINDOW_ROWS]
            yield _texts(some, number, name)
            number += len(some)
    if rest:
        yield _texts([rest], number, name)


def _texts(lines: list[bytes], first: int, name: str) -> pa.RecordBatch:
    texts = []
    for number, line in enumerate(lines, first):
        text, byte = decoded(line.removesuffix(b"\r"), number)
        if byte:
            raise UserError("not-utf8", value=f"{name}:{number}", byte=byte)
        texts.append(text)
    return text_batch(texts)


def standard_input() -> Iterator[pa.RecordBatch]:
    """The lines of standard input."""
    return line_windows(cast(BufferedReader, sys.stdin.buffer), "standard input")
