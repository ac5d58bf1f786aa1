"""Load the conversations of a run: read any of the usual forms, and check them before anything expensive starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.shared_arguments import BadRowArguments
from indictune.data.bad_rows import BadRows, Record, bad_rows
from indictune.data.cache import StoredRows, leaked_rows, map_table, text_keys, write_table
from indictune.data.chat.messages import (
    UNUSED_CONTENT,
    Row,
    RowError,
    UnusedColumns,
    chat_records,
    is_filled,
    is_prompt_text,
    messages_of,
    parse_columns,
)
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.health.encodings import DamagedTexts
from indictune.data.health.findings import Finding, Found, repeated_rows
from indictune.data.languages import language_of
from indictune.data.read.row_sources import SPLITS, Source, SplitRows, file_source, refuse_early, sources_by_split
from indictune.data.row_choice import Mixture, Splits, ValidationSplit, stored_splits
from indictune.errors import Problem, Problems, UserError, attributed_to, problem

ChatSource = Source[Record]

# Rows held as Python objects before they become arrow arrays; a conversation may be long.
_CHUNK_ROWS = 2_000
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
SCHEMA = pa.schema({"messages": _MESSAGES, "language": pa.string(), "line": pa.int64(), "as_written": pa.bool_()})


class Conversations(StoredRows):
    """The conversations of one split.

    The table has columns `messages` (list of `role` and `content`: an optional system message, then user and assistant
    by turns, the last of assistant; none is empty), `language` (string), `line`, and `as_written` (bool, the same in
    all rows: each is one prompt and one completion, given as plain texts). No nulls.
    """

    kind: ClassVar[str] = "conversations"  # as messages name the rows
    schema: ClassVar[pa.Schema] = SCHEMA
    also_used: ClassVar[Sequence[str]] = ()  # keys of a row besides those of its form

    @staticmethod
    def records(rows: SplitRows, bad: BadRows, names: Mapping[str, str]) -> Iterator[Record]:
        """As `chat_records`; raises `UserError` if the rows are of another task."""
        return _without_pairs(rows, bad, names, "rows-of-pairs")

    @staticmethod
    def columns_of(record: Row) -> dict[str, Any]:
        """The columns of a row, without `language` and `line`; raises `RowError` if it cannot be used."""
        return {"messages": messages_of(record), "as_written": is_prompt_text(record)}

    @staticmethod
    def findings(rows: Mapping[str, Any]) -> list[Finding]:
        """What is suspicious in the rows of each split; some are of no row."""
        return [repeated_rows(each, text_keys(each.texts)) for each in rows.values()]

    @property
    def texts(self) -> Iterator[str]:
        """The contents of each row's messages, with `BETWEEN_TEXTS` between them."""
        for batch in self.table.to_batches(_CHUNK_ROWS):
            yield from _whole_text(batch).to_pylist()


def is_pair(row: Row) -> bool:
    """Whether a row has a better and a worse answer."""
    return is_filled(row.get("chosen")) and is_filled(row.get("rejected"))


def _without_pairs(rows: SplitRows, bad: BadRows, names: Mapping[str, str], code: str) -> Iterator[Record]:
    """As `chat_records`; raises `UserError` of the code for a pair, of which one answer would be lost."""
    for line, record in chat_records(rows, bad, names):
        if is_pair(record):
            raise UserError(code, value=bad.location(line))
        yield line, record


def chat_sources(
    args: ChatDataArguments, problems: Problems, rows_type: type[Conversations] = Conversations
) -> dict[str, ChatSource]:
    """The sources of rows of the type by split; arguments as of `sources_by_split`."""
    names = problems.attempt(parse_columns, args.columns) or {}
    sources = sources_by_split(args, problems, "builtin:chats", partial(rows_type.records, names=names))
    return {split: _renamed(source, names) for split, source in sources.items()}


def evaluated_file(
    path: str, columns: str | None = None, rows_type: type[Conversations] = Conversations
) -> dict[str, ChatSource]:
    """The source of `--test_file`, a json, jsonl or parquet file; raises as `parse_columns`."""
    names = parse_columns(columns)
    of_answers = partial(_without_pairs, code="pairs-not-scored")
    read = partial(of_answers if rows_type is Conversations else rows_type.records, names=names)
    return {"test": _renamed(file_source(path, "--test_file", read), names)}


def _renamed(source: ChatSource, names: Mapping[str, str]) -> ChatSource:
    """The source, with a fingerprint that depends on the names of its columns."""
    return replace(source, fingerprint=f"{source.fingerprint} {json.dumps(names)}")


def is_as_written(source: ChatSource) -> bool | None:
    """Whether the first row is a prompt and a completion, given as plain texts; None if it cannot be used."""
    try:
        _, record = next(source.read(BadRows(source.name)))
        return is_prompt_text(record)
    except (UserError, RowError, StopIteration):
        return None


Read = TypeVar("Read", bound=Conversations)


def load_conversations(
    sources: Mapping[str, ChatSource],
    args: BadRowArguments,
    found: Sequence[Problem] = (),
    validation_split: ValidationSplit | None = None,
    mixture: Mixture | None = None,
    rows_type: type[Any] = Conversations,
) -> Splits[Any]:
    """Read and check conversations, or rows of another type of them, or take them from the cache.

    If problems were `found` so far, only the first rows of long files are read. Raises `UserError` with all problems
    of all files at once, and those of `found`. `validation_split` and `mixture` as of `stored_splits`.
    """
    problems = Problems(found)

    def read(folder: Path, seen: Found) -> dict[str, Any]:
        refuse_early(problems, sources.values(), _CHUNK_ROWS)
        rows: dict[str, Any] = {}
        for split, source in sources.items():
            with problems.collecting(), attributed_to(source.origin):
                bad = bad_rows(source.name, args, folder)
                rows[split] = _read_split(rows_type, source, folder / f"{split}.arrow", bad, seen)
        for each in rows.values():
            other = pc.index(each.table["as_written"], not are_as_written(rows)).as_py()
            if other >= 0:
                problems.append(problem("forms-mixed", each.origin, each.location(other)))
        problems.raise_any()
        seen.findings += [each for each in (*_leaks(rows, folder), *rows_type.findings(rows)) if each.count]
        return rows

    settings = [args.bad_rows, args.max_bad_fraction]
    return stored_splits(rows_type.kind, rows_type, sources, settings, read, validation_split, mixture)


def _read_split(rows_type: type[Read], source: ChatSource, path: Path, bad: BadRows, seen: Found) -> Read:
    """Read and check the rows of one split; `path` gets the table."""
    unused, damaged = UnusedColumns(), DamagedTexts()
    with bad.problems.collecting():
        rows = _rows(rows_type, source.read(bad), bad, unused, damaged)
        batches = iter(lambda: list(islice(rows, _CHUNK_ROWS)), [])
        tables = (pa.RecordBatch.from_pylist(chunk, rows_type.schema) for chunk in batches)
        write_table(path, rows_type.schema, tables, f"reading {source.name}")
    bad.problems.extend(unused.problems(bad))
    bad.finish(map_table(path).num_rows if not bad.problems else 0)
    read = rows_type(map_table(path), source.name, source.origin, bad.files)
    seen.notes += [f"{source.origin} {note}" for note in (*bad.notes(), *unused.notes(source.name))]
    seen.findings += damaged.findings(source.origin, bad, len(read))
    return read


def _rows(
    rows_type: type[Conversations],
    records: Iterator[Record],
    bad: BadRows,
    unused: UnusedColumns,
    damaged: DamagedTexts,
) -> Iterator[dict[str, object]]:
    for line, record in records:
        try:
            columns = rows_type.columns_of(record)
        except RowError as error:
            if error.code == UNUSED_CONTENT:
                unused.refuse(line, error)
            else:
                bad.add(line, error.code, record, **error.details)
        else:
            unused.count({key: record[key] for key in record if key not in rows_type.also_used})
            messages = columns["messages"]
            for message in messages:
                damaged.check(message["content"], line)
            named = record.get("language")
            language = named.strip() if isinstance(named, str) else ""
            if not language:
                language = language_of("\n".join(each["content"] for each in messages if each["role"] != "system"))
            yield {**columns, "language": language, "line": line}


def are_as_written(splits: Mapping[str, Conversations]) -> bool:
    """Whether all rows are prompts and completions, given as plain texts."""
    return bool(next(iter(splits.values())).table["as_written"][0].as_py())


def _leaks(rows: Mapping[str, Conversations], folder: Path) -> Iterator[Finding]:
    """Training rows that are held-out rows too."""
    for held_out in (rows[split] for split in SPLITS[1:] if split in rows and "train" in rows):
        train, leaked = rows["train"], leaked_rows(folder / "train.arrow", held_out.table, _whole_text)
        count = int(leaked.sum())
        note = (
            f"{train.source}: {count} of {len(train)} training rows also stand in {held_out.source}, whose scores "
            "will look too good; remove them from one of the two."
        )
        yield Finding("leaked_rows", count, len(train), note)


def _whole_text(batch: pa.RecordBatch) -> pa.Array:
    """One string for each row, equal if the messages are. Their number gives the roles: odd with a system message."""
    messages = batch["messages"]
    contents = pa.ListArray.from_arrays(messages.offsets, messages.values.field("content"))
    return pc.binary_join(contents, BETWEEN_TEXTS)
