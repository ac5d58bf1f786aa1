"""Load the conversations of a run: read any of the usual forms, and check them before anything expensive starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import BadRowArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.arrow_tables import map_table, write_table
from indictune.data.bad_rows import BadRows, Quarantine, bad_rows
from indictune.data.cache import build_once
from indictune.data.hub_rows import hub_records
from indictune.data.languages import language_of
from indictune.data.messages import PROMPT_TEXTS, RowError, form_of, messages_of
from indictune.data.progress_bar import with_progress
from indictune.data.read_files import Record, read_records, without_surrogates
from indictune.data.row_sources import SPLITS, Reader, Source, file_source, refuse_early, sources_by_split
from indictune.data.rows import StoredRows, leaked_rows, read_facts, write_facts
from indictune.errors import Problem, Problems, UserError, attributed_to, problem

ChatSource = Source[Record]

_READER: Reader[Record] = Reader("builtin:chats", "samples/chats", read_records, hub_records)
# Rows held as Python objects before they become arrow arrays; a conversation may be long.
_CHUNK_ROWS = 2_000
_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("language", pa.string()),
        ("line", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Conversations(StoredRows):
    """The conversations of one split.

    The table has columns `messages` (list of `role` and `content`: an optional system message, then user and assistant
    by turns, the last of assistant; none is empty), `language` (string) and `line`. No nulls.

    Attributes:
        as_written: each row is one prompt and one completion, given as plain texts.
        left_out: number of rows that were left out when they were read.
    """

    as_written: bool = False
    left_out: int = 0


@dataclass(frozen=True)
class ConversationSplits:
    """All conversations of a run; `as_written` is the same in all of them.

    Attributes:
        train: rows to train on.
        validation: rows for the evaluations of a run, or None.
        test: rows to evaluate once at the end, or None.
        folder: holds the tables as `<split>.arrow`; its name changes with everything that the rows depend on.
        notes: sentences for the user, such as bad rows that were left out.
    """

    train: Conversations
    validation: Conversations | None
    test: Conversations | None
    folder: Path
    notes: list[str] = field(default_factory=list)


def load_conversations(
    args: ChatDataArguments, found: Problems | None = None, sources: Mapping[str, ChatSource] | None = None
) -> ConversationSplits:
    """Read and check all conversations of a run, or take them from the cache.

    All rows of a file have one form, recognised by its keys: `messages` (role, content), `conversations` (from,
    value), `prompt` and `completion` (texts or lists of messages), or `instruction` and `output` (`input`, `history`).
    All forms but plain texts may have `system`.

    Args:
        args: how they are read.
        found: problems of the run so far. With any, only the first rows of long files are read.
        sources: from `sources_of`, if the caller has them.

    Raises:
        UserError: all problems of all files at once, and those of `found`.
    """
    problems = Problems(found or ())
    given = sources_of(args, problems) if sources is None else sources

    def make(folder: Path) -> None:
        loaded, notes = _read_splits(folder, given, args, problems)
        if "train" in loaded:
            held_out = [loaded[split] for split in SPLITS[1:] if split in loaded]
            problems.extend(_mixed_forms(loaded["train"], held_out))
        problems.raise_any()
        _write_facts(folder, loaded, notes)

    parts = [
        [[split, source.name, source.origin, source.fingerprint] for split, source in given.items()],
        *(args.bad_rows, args.max_bad_fraction),
    ]
    folder = build_once("conversations", parts, "The conversations", make)
    rows, notes = _stored(folder)
    return ConversationSplits(rows["train"], rows.get("validation"), rows.get("test"), folder, notes)


def load_test_conversations(
    path: str, args: BadRowArguments, found: Sequence[str] = ()
) -> tuple[Conversations, Path, list[str]]:
    """Read and check a file of conversations for a finished model, or take them from the cache.

    Args:
        path: `--test_file`, a json, jsonl or parquet file.
        args: say what happens to bad rows.
        found: problems of the command so far. With any, only the first rows of a long file are read.

    Returns:
        The conversations, the folder with the rejected rows, and notes for the user.

    Raises:
        UserError: all problems of the file at once; or `found`.
    """
    source = file_source(path, "--test_file", _READER)

    def make(folder: Path) -> None:
        problems = Problems(found)
        loaded, notes = _read_splits(folder, {"test": source}, args, problems)
        problems.raise_any()
        _write_facts(folder, loaded, notes)

    parts = [source.name, source.fingerprint, args.bad_rows, args.max_bad_fraction]
    folder = build_once("test-conversations", parts, "The conversations", make)
    rows, notes = _stored(folder)
    return rows["test"], folder, notes


def _read_splits(
    folder: Path, sources: Mapping[str, ChatSource], args: BadRowArguments, problems: Problems
) -> tuple[dict[str, Conversations], list[str]]:
    """Read the rows of all splits into `<split>.arrow`; `problems` gets theirs.

    Returns:
        The rows by split, and notes for the user.
    """
    refuse_early(problems, sources.values(), args, folder, _CHUNK_ROWS)
    loaded: dict[str, Conversations] = {}
    notes: list[str] = []
    for split, source in sources.items():
        bad = bad_rows(source.name, args, folder)
        with problems.collecting(), attributed_to(source.origin):
            loaded[split] = _read_split(source, folder / f"{split}.arrow", bad)
        notes += [f"{source.origin} {note}" for note in bad.notes()]
    return loaded, notes


def _write_facts(folder: Path, loaded: Mapping[str, Conversations], notes: list[str]) -> None:
    splits = {
        split: (rows.source, rows.origin, rows.files, rows.as_written, rows.left_out) for split, rows in loaded.items()
    }
    write_facts(folder, {"splits": splits, "notes": notes})


def _stored(folder: Path) -> tuple[dict[str, Conversations], list[str]]:
    facts = read_facts(folder)
    splits = facts["splits"].items()
    rows = {split: Conversations(map_table(folder / f"{split}.arrow"), *each) for split, each in splits}
    return rows, facts["notes"]


def sources_of(args: ChatDataArguments, problems: Problems) -> dict[str, ChatSource]:
    """The sources of conversations by split; arguments as of `sources_by_split`."""
    return sources_by_split(args, problems, _READER)


def is_as_written(source: ChatSource) -> bool | None:
    """Whether the first row is a prompt and a completion, given as plain texts; None if it cannot be used."""
    try:
        _, record = next(source.read(BadRows(source.name)))
        return form_of(record) == PROMPT_TEXTS
    except (UserError, RowError, StopIteration):
        return None


def _read_split(source: ChatSource, path: Path, bad: BadRows) -> Conversations:
    """Read and check the rows of one split; `path` gets the table.

    Raises:
        UserError: all problems of the rows at once.
    """
    forms = _Forms()
    with bad.problems.collecting():
        batches = _batches(source.read(bad), forms, bad)
        write_table(path, _SCHEMA, with_progress(batches, f"reading {source.name}"))
    bad.problems += forms.problems(bad)
    bad.finish(map_table(path).num_rows if not bad.problems else 0)
    as_written = PROMPT_TEXTS in forms.first
    return Conversations(map_table(path), source.name, source.origin, bad.files, as_written, bad.count)


class _Forms:
    """The forms of a file's rows: line of the first row, number of rows."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.count: Counter[str] = Counter()

    def add(self, form: str, line: int) -> None:
        self.first.setdefault(form, line)
        self.count[form] += 1

    def problems(self, bad: BadRows) -> Iterator[Problem]:
        if len(self.first) > 1:
            forms = [
                f"{form} ({self.count[form]}, the first at {bad.location(line)})" for form, line in self.first.items()
            ]
            yield problem("forms-mixed", value=bad.source, count=len(forms), forms=", ".join(forms))


def _batches(records: Iterator[Record], forms: _Forms, bad: BadRows) -> Iterator[pa.RecordBatch]:
    rows = _rows(records, forms, bad)
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        yield pa.RecordBatch.from_pylist(chunk, _SCHEMA)


def _rows(records: Iterator[Record], forms: _Forms, bad: BadRows) -> Iterator[dict[str, object]]:
    """Rows of the table. The form of a bad row counts if the row stops the run, not if it is left out."""
    for line, record in records:
        form = None
        try:
            form = form_of(record)
            messages = messages_of(record, form)
        except RowError as error:
            bad.add(line, error.code, record, **error.details)
            if isinstance(bad, Quarantine):
                continue
        else:
            yield {"messages": messages, "language": _language(record, messages), "line": line}
        if form is not None:
            forms.add(form, line)


def _language(record: dict[str, object], messages: list[dict[str, str]]) -> str:
    named = record.get("language")
    if isinstance(named, str) and named.strip():
        return without_surrogates(named.strip())
    return language_of("\n".join(message["content"] for message in messages if message["role"] != "system"))


def _mixed_forms(train: Conversations, held_out: list[Conversations]) -> Iterator[Problem]:
    """A problem for each held-out split whose form differs from the training rows'."""
    how = {True: "prompt and completion as plain texts", False: "messages between roles"}
    for rows in held_out:
        if rows.as_written != train.as_written:
            details: dict[str, Any] = {
                "form": how[rows.as_written],
                "train": train.source,
                "train_form": how[train.as_written],
            }
            yield problem("splits-differ", rows.origin, rows.source, **details)


def leak_note(train: Conversations, path: Path, held_out: Conversations) -> str | None:
    """A note about training rows, stored at `path`, that also stand in held-out rows; None if none does."""
    count = sum(pc.sum(mask).as_py() or 0 for mask in leaked_rows(path, held_out.table, _whole_text))
    if not count:
        return None
    return (
        f"{train.source}: {count} of {len(train)} training rows also stand in {held_out.source}, whose scores will "
        "look too good; remove them from one of the two."
    )


def _whole_text(batch: pa.RecordBatch) -> pa.Array:
    """One string for each row, equal if the messages are. Their number gives the roles: odd with a system message."""
    messages = batch["messages"]
    contents = pa.ListArray.from_arrays(messages.offsets, messages.values.field("content"))
    return pc.binary_join(contents, "\x00")
