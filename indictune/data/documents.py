"""Read documents of raw text, from txt files and from columns, and check them before anything expensive starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.shared_arguments import RawTextForm
from indictune.data.bad_rows import BadRows, bad_rows
from indictune.data.cache import StoredRows, map_table, text_keys, with_column, with_progress, write_table
from indictune.data.columns import Wanted, layout_of
from indictune.data.health.encodings import DamagedTexts
from indictune.data.health.findings import Finding, Found, repeated_rows
from indictune.data.languages import languages_of
from indictune.data.read.open_files import decoded_lines
from indictune.data.read.read_files import Record, SplitFiles, checked_extension
from indictune.data.read.row_sources import SPLITS, Read, Source, SplitRows, refuse_early
from indictune.data.row_choice import Mixture, Splits, ValidationSplit, stored_splits
from indictune.data.text.cleaning import cleaned
from indictune.errors import Problem, Problems, UserError, attributed_to
from indictune.files import kind_of_file

BUILTIN_TEXTS = "builtin:tweets"
# Control characters that no text has, but for white space: they are bytes of another kind of file.
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")
_AT_ONCE = 1_000  # documents of a txt file
_LONGEST = 1_000_000  # characters; a longer block of a txt file is several documents, which end with its lines
_SCHEMA = pa.schema({"text": pa.string(), "language": pa.string(), "line": pa.int64()})
_TXT = ".txt"

TextBatches = Source[pa.RecordBatch]


def _wanted(args: RawTextForm) -> Wanted:
    required, optional = {"text": args.text_column}, {"language": "language"}
    if args.language_column is not None:
        required, optional = required | {"language": args.language_column}, {}
    return Wanted(required, optional, **layout_of(args))


def document_reader(args: RawTextForm) -> Read[pa.RecordBatch]:
    """Read documents: those of txt files, or the rows of other files and datasets, each a document."""
    wanted = _wanted(args)

    def of_file(path: str, bad: BadRows) -> Iterator[Record]:
        if args.language_column is not None or wanted.given_layout():
            names = "--language_column, --delimiter, --column_names and --quoting"
            bad.remark(f"{path}: ignoring {names}, because a txt file has no columns.")
        return txt_documents(path, args.txt_documents == "lines", bad)

    def read(rows: SplitRows, bad: BadRows) -> Iterator[pa.RecordBatch]:
        if isinstance(rows, SplitFiles) and _TXT in map(kind_of_file, rows.files):
            return _as_batches(rows.records(bad, of_file))
        return rows.batches(wanted, bad)

    return read


def _as_batches(records: Iterator[Record]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(records, _AT_ONCE)):
        texts = pa.array([record["text"] for _, record in some], pa.string())
        columns = [texts, pa.nulls(len(some), pa.string()), pa.array([line for line, _ in some], pa.int64())]
        yield pa.record_batch(columns, schema=_SCHEMA)


def txt_documents(path: str, one_a_line: bool, bad: BadRows) -> Iterator[Record]:
    """The documents of a txt file, each with its first line, from 1. `bad` gets lines that are not UTF-8."""
    checked_extension(path, (_TXT,))
    lines, first, size, count, blank = list[str](), 1, 0, 0, 0
    for number, (line, byte) in enumerate(decoded_lines(path), 1):
        is_blank = not line.strip()
        blank += is_blank
        if lines and (is_blank or one_a_line or size > _LONGEST):
            if not (is_blank or one_a_line):
                bad.remark(f"{path}: blocks of over {_LONGEST:,} characters are read as several documents.")
            yield first, {"text": "\n".join(lines)}
            lines, size, count = [], 0, count + 1
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
        elif not is_blank:
            first = first if lines else number
            lines.append(line.rstrip("\r\n"))
            size += len(line)
    if lines:
        yield first, {"text": "\n".join(lines)}
        if not (count or blank or one_a_line) and len(lines) > 1:
            bad.remark(f"{path}: no line is blank, so all are one document. --txt_documents lines reads each as one.")
    elif not count and not bad.count:
        raise UserError("no-rows", value=path)


def load_documents(
    sources: Mapping[str, TextBatches],
    args: RawTextForm,
    found: Sequence[Problem],
    cleans: bool,
    validation_split: ValidationSplit | None = None,
    mixture: Mixture | None = None,
) -> Splits[StoredRows]:
    """Read and check documents, or take them from the cache: columns `text`, `language` and `line`.

    If problems were `found` so far, only the first rows of long files are read. With `cleans`, texts are cleaned as
    those of a classifier are. `validation_split` and `mixture` as of `stored_splits`.

    Raises:
        UserError: all problems of all files, and those of `found`.
    """
    problems = Problems(found)

    def read(folder: Path, seen: Found) -> dict[str, StoredRows]:
        refuse_early(problems, sources.values(), 1)
        rows: dict[str, StoredRows] = {}
        for split, source in sources.items():
            bad = bad_rows(source.name, args, folder)
            with problems.collecting(), attributed_to(source.origin):
                rows[split] = _read_split(source, args.text_column, folder / f"{split}.arrow", bad, cleans, seen)
        problems.raise_any()
        seen.findings += _same_documents(rows)
        return rows

    settings = [asdict(_wanted(args)), args.txt_documents, args.bad_rows, args.max_bad_fraction, cleans]
    return stored_splits("documents", StoredRows, sources, settings, read, validation_split, mixture)


def _read_split(source: TextBatches, column: str, path: Path, bad: BadRows, cleans: bool, seen: Found) -> StoredRows:
    damaged, read = DamagedTexts(), list[int]()
    texts = _texts(damaged.watching(source.read(bad)), bad, read)
    with bad.problems.collecting():
        documents = _cleaned(texts) if cleans else map(_with_languages, texts)
        write_table(path, _SCHEMA, with_progress(documents, f"reading {source.name}"))
    table = map_table(path) if not bad.problems else pa.table([[]], ["text"])
    bad.finish(len(table))
    if not len(table):
        raise UserError("no-texts", value=source.name, rows=sum(read), column=column)
    seen.notes += [f"{source.origin} {note}" for note in bad.notes()]
    if empty := sum(read) - len(table):
        seen.notes.append(f"{source.origin} {source.name}: {empty:,} rows without text were dropped.")
    seen.findings += damaged.findings(source.origin, bad, len(table))
    return StoredRows(table, source.name, source.origin, bad.files)


def _texts(batches: Iterator[pa.RecordBatch], bad: BadRows, read: list[int]) -> Iterator[pa.RecordBatch]:
    """The rows that have a text. `bad` gets those with binary in it, and `read` how many others there are."""
    for batch in batches:
        texts = batch["text"].to_pylist()
        found = [_BINARY.search(text or "") for text in texts]
        for row, match in enumerate(found):
            if match is not None:
                given = {"text": texts[row], "language": batch["language"][row].as_py()}
                bad.add(batch["line"][row].as_py(), "binary-in-text", given, character=f"U+{ord(match[0]):04X}")
        read.append(found.count(None))
        has_text = [match is None and bool((text or "").strip()) for text, match in zip(texts, found, strict=True)]
        yield batch.select(_SCHEMA.names).filter(pa.array(has_text, pa.bool_()))


def _cleaned(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    unlabelled = (batch.append_column("label", pa.nulls(len(batch), pa.string())) for batch in batches)
    for batch in cleaned(unlabelled):
        yield batch.select(_SCHEMA.names).filter(pc.not_equal(batch["text"], ""))


def _with_languages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with a language in each, the text's where the row names none."""
    named = [(language or "").strip() for language in batch["language"].to_pylist()]
    texts = batch["text"].to_pylist()
    found = iter(languages_of(text for text, name in zip(texts, named, strict=True) if not name))
    languages = [name or next(found) for name in named]
    return with_column(batch, "language", pa.array(languages, pa.string()))


def _same_documents(rows: Mapping[str, StoredRows]) -> list[Finding]:
    """Training rows whose text is held out too, and rows that repeat an earlier one of their split."""
    keys = {split: text_keys(each.texts) for split, each in rows.items()}
    found = [repeated_rows(each, keys[split]) for split, each in rows.items()]
    for held_out in (split for split in SPLITS[1:] if split in rows and "train" in rows):
        train, count = rows["train"], int(np.isin(keys["train"], keys[held_out]).sum())
        note = f"{train.source}: {count:,} of {len(train):,} training rows also stand in {rows[held_out].source}"
        found.append(Finding("leaked_rows", count, len(train), f"{note}, whose scores will look too good."))
    return [each for each in found if each.count]
