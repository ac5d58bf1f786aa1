"""Write labelled rows as csv, tsv, jsonl, parquet, or a workbook of Excel."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from indictune.data.columns import joined_list
from indictune.data.read.delimited import DELIMITERS
from indictune.errors import UserError
from indictune.prediction.labelled_rows import as_records

MOST_SHEET_ROWS = (1 << 20) - 1  # of Excel, besides the header
_MOST_LETTERS = 32_767  # of a cell
_FORMULA = re.compile(r"[=@]|[+-](?!\d+(?:\.\d+)?\Z)")
_DIGITS = 6  # of a score; float32 has seven
Write = Callable[[BinaryIO, Iterable[pa.RecordBatch]], None]


def writer_of(path: str, for_excel: bool = False) -> Write:
    """The function that writes the kind of file that the extension says; else `file-kind-unknown`.

    With a byte order mark, Excel reads csv and tsv as UTF-8.
    """
    extension = Path(path).suffix.lower()
    if extension not in _WRITERS:
        raise UserError("file-kind-unknown", "--output_file", path, expected=", ".join(_WRITERS))
    return _delimited(DELIMITERS[extension], "utf-8-sig") if for_excel else _WRITERS[extension]


def as_json_lines(batch: pa.RecordBatch) -> str:
    """A line of JSON for each row, with the scores of its labels in one object."""
    return "".join(f"{json.dumps(rounded(row), ensure_ascii=False)}\n" for row in as_records(batch))


def rounded(value: Any) -> Any:
    """A row with as many digits of its scores as they have."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value


def _write_json_lines(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    file.writelines(as_json_lines(batch).encode() for batch in batches)


def _write_parquet(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    writer = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(file, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


def _delimited(delimiter: str, encoding: str = "utf-8") -> Write:
    def write(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
        text = io.TextIOWrapper(file, encoding=encoding, newline="")
        lines = csv.writer(text, delimiter=delimiter, lineterminator="\n")
        for number, batch in enumerate(batches):
            if number == 0:
                lines.writerow(map(_cell, batch.schema.names))
            lines.writerows(zip(*(map(_cell, batch[name].to_pylist()) for name in batch.schema.names), strict=True))
        text.flush()
        text.detach()

    return write


def _cell(value: Any) -> Any:
    """A value as training reads it from a csv file: several labels as `a|b`, none of them as `|`.

    A text that a spreadsheet would take for a formula gets an apostrophe, unless it is a number.
    """
    if isinstance(value, float):
        return round(value, _DIGITS)
    value = joined_list(value)
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _write_workbook(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    import xlsxwriter  # only who asks for it

    as_text = dict.fromkeys(("strings_to_formulas", "strings_to_urls", "strings_to_numbers"), False)
    with xlsxwriter.Workbook(file, {"constant_memory": True, **as_text}) as book:
        sheet, line = book.add_worksheet("labels"), 0
        for batch in batches:
            rows = zip(*batch.to_pydict().values(), strict=True)
            for row in chain([] if line else [batch.schema.names], rows):
                sheet.write_row(line, 0, map(_sheet_cell, row))
                line += 1


def _sheet_cell(value: Any) -> Any:
    value = joined_list(rounded(value))
    return value[:_MOST_LETTERS] if isinstance(value, str) else value


_WRITERS = {
    ".xlsx": _write_workbook,
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
KINDS = tuple(_WRITERS)
