"""Read documents of raw text, from txt files and from columns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.shared_arguments import RawTextForm
from indictune.data.bad_rows import BadRows
from indictune.data.columns import document_columns
from indictune.data.read.open_files import decoded_lines
from indictune.data.read.read_files import Record, SplitFiles, checked_extension, checked_rows
from indictune.data.read.row_sources import Read, SplitRows
from indictune.files import kind_of_file

BUILTIN_TEXTS = "builtin:tweets"
# Control characters that no text has, but for white space: they are bytes of another kind of file.
_BINARY = r"[\x00-\x08\x0e-\x1b\x7f]"
_AT_ONCE = 1_000  # documents of a txt file
_LONGEST = 1_000_000  # characters; a longer block of a txt file is several documents, which end with its lines
_TXT = ".txt"


def document_reader(args: RawTextForm) -> Read[pa.RecordBatch]:
    """Read documents: those of txt files, or the rows of other files and datasets, each a document without a label."""
    wanted = document_columns(args)

    def of_file(path: str, bad: BadRows) -> Iterator[Record]:
        return checked_rows(path, txt_documents(path, bad, args.txt_documents == "lines"), bad)

    def read(rows: SplitRows, bad: BadRows) -> Iterator[pa.RecordBatch]:
        if isinstance(rows, SplitFiles) and _TXT in map(kind_of_file, rows.files):
            batches = _batches(rows.records(bad, of_file))
        else:
            batches = rows.batches(wanted, bad)
        for batch in batches:
            is_binary = pc.fill_null(pc.match_substring_regex(batch["text"], _BINARY), False)
            for row in batch.filter(is_binary).to_pylist():
                bad.add(row.pop("line"), "binary-in-text", row)
            texts = batch.filter(pc.invert(is_binary))
            yield texts.append_column("label", pa.nulls(len(texts), pa.string()))

    return read


def _batches(records: Iterator[Record]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(records, _AT_ONCE)):
        texts = pa.array([record["text"] for _, record in some], pa.string())
        columns = [texts, pa.nulls(len(some), pa.string()), pa.array([line for line, _ in some], pa.int64())]
        yield pa.record_batch(columns, ["text", "language", "line"])


def txt_documents(path: str, bad: BadRows, one_a_line: bool) -> Iterator[Record]:
    """The documents of a txt file, each with its first line, from 1. `bad` gets lines that are not UTF-8."""
    checked_extension(path, (_TXT,))
    lines, first, size = list[str](), 1, 0
    for number, (line, byte) in enumerate(decoded_lines(path), 1):
        is_blank = not line.strip()
        if lines and (one_a_line or is_blank or size > _LONGEST):
            yield first, {"text": "\n".join(lines)}
            lines, size = [], 0
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
        elif not is_blank:
            first = first if lines else number
            lines.append(line.rstrip("\r\n"))
            size += len(line)
    if lines:
        yield first, {"text": "\n".join(lines)}
