"""How csv and tsv files and sheets are laid out: what the flags say, or what the first rows show."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from indictune.config.shared_arguments import FileFormArguments
from indictune.data.bad_rows import BadRows
from indictune.data.columns import has_columns
from indictune.data.read.open_files import kind_of_file, opened

DELIMITERS = {".csv": ",", ".tsv": "\t"}
CHARACTERS = {",": ",", ";": ";", "tab": "\t", "|": "|"}
_SAMPLE_BYTES = 1 << 16
SAMPLE_ROWS = 20


@dataclass(frozen=True)
class FileForm:
    """What the flags say about csv and tsv files.

    Attributes:
        delimiter: one of `,`, `;`, `tab`, `|`, or `auto`.
        column_names: in their order, of files without a header; empty if there is a header.
        quoting: `standard`, or `none` if quotes are letters like others.
    """

    delimiter: str = "auto"
    column_names: tuple[str, ...] = ()
    quoting: str = "standard"

    @property
    def reading(self) -> dict[str, Any]:
        """Options of `csv.reader`, without the delimiter."""
        # Without strict=True, csv drops a stray quote from a text, or takes all rows up to the next one as one.
        return {"strict": True, "quoting": csv.QUOTE_NONE if self.quoting == "none" else csv.QUOTE_MINIMAL}


STANDARD = FileForm()


def form_of(args: FileFormArguments) -> FileForm:
    """The form that the flags give."""
    names = [name.strip() for word in args.column_names for name in word.split(",")]
    return FileForm(args.delimiter, tuple(filter(None, names)), args.quoting)


def first_rows(path: str, delimiter: str, form: FileForm) -> list[list[str]]:
    """The first few rows that are not blank; bytes that are no text are replaced."""
    with opened(path) as file:
        lines = file.read(_SAMPLE_BYTES).decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    rows: list[list[str]] = []
    with suppress(csv.Error):  # of a broken row, or of one that the sample cuts
        rows.extend(islice(filter(None, csv.reader(lines, delimiter=delimiter, **form.reading)), SAMPLE_ROWS))
    return rows


def delimiter_of(path: str, form: FileForm, wanted: Mapping[str, str], bad: BadRows) -> str:
    """The delimiter that `--delimiter` names; for `auto`, the one that fits the first rows.

    It is that of the extension, unless the `wanted` columns (role -> name) come out with another one alone; `bad` gets
    a remark then. Without a header, most rows must have as many fields as there are column names; without those, two
    or more, all as many.
    """
    if form.delimiter != "auto":
        return CHARACTERS[form.delimiter]
    own = DELIMITERS[kind_of_file(path)]
    delimiter = _fitting_delimiter(path, own, form, wanted)
    if delimiter != own:
        name = next(name for name, each in CHARACTERS.items() if each == delimiter)
        bad.remark(f"{path}: its columns are separated by {name} (--delimiter).")
    return delimiter


def _fitting_delimiter(path: str, own: str, form: FileForm, wanted: Mapping[str, str]) -> str:
    samples = {own: first_rows(path, own, form)}
    if form.column_names or not _fitting(samples[own], form, wanted):
        samples |= {each: first_rows(path, each, form) for each in CHARACTERS.values() if each != own}
    fitting = {each: _fitting(rows, form, wanted) for each, rows in samples.items()}
    best = max(fitting, key=lambda each: fitting[each])
    if fitting[best]:
        return best
    return next((each for each, rows in samples.items() if len({*map(len, rows)}) == 1 and rows[0][1:]), own)


def _fitting(rows: Sequence[Sequence[str]], form: FileForm, wanted: Mapping[str, str]) -> int:
    """How many of the first rows have the wanted fields."""
    if form.column_names:
        return sum(len(row) == len(form.column_names) for row in rows)
    return len(rows) * has_columns(rows[0] if rows else (), wanted)


def decoded_lines(path: str) -> Iterator[tuple[str, str]]:
    """Lines with their ends, without a byte order mark, and the first byte that is not UTF-8, such as `0xff`, or "".

    U+DC80 to U+DCFF stand for the bytes that are not UTF-8.
    """
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            yield decoded(line, number)


def decoded(line: bytes, number: int) -> tuple[str, str]:
    """The text of a line and its first byte that is not UTF-8, as in `decoded_lines`; `number` counts from 1."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode(), ""
    except UnicodeDecodeError as error:
        return line.decode(errors="surrogateescape"), f"0x{line[error.start]:02x}"
