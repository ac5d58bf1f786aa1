"""The conversations of a run: read from any of the usual forms, and checked before anything expensive starts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import BadRowArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.arrow_tables import map_table, stored_batches, write_table
from indictune.data.bad_rows import BadRows, Quarantine, bad_rows, place
from indictune.data.cache import file_digest, made_once
from indictune.data.hub_datasets import CsvFiles, fingerprint_of, hub_records, load_hub_dataset, name_of
from indictune.data.languages import language_of
from indictune.data.messages import PROMPT_TEXTS, RowError, form_of, messages_of
from indictune.data.progress_bar import shown
from indictune.data.read_files import RECORD_EXTENSIONS, Record, read_records, without_halves
from indictune.data.row_sources import BUILTIN_PREFIX, SPLITS, by_split, refuse_early, used_splits
from indictune.errors import Problems, UserError

BUILTIN_CHATS = "builtin:chats"

_FACTS = "facts.json"
# Rows held as Python objects before they become arrow arrays; a conversation may be long.
_CHUNK_ROWS = 2_000
# Compared with the held-out rows at a time, whose texts are gathered anew each time.
_LEAK_BATCHES = 20
_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("language", pa.string()),
        ("line", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Conversations:
    """The conversations of one split.

    Attributes:
        table: columns `messages` (list of `role` and `content`: an optional system message, then user and assistant
            by turns, an answer of assistant last; none is empty), `language` (string) and `line` (int64: line of the
            file, or number of the row in a parquet file or dataset, from 1). No nulls.
        source: the file or dataset they come from, as messages name it.
        origin: the flag and value that named it.
        as_written: each is one prompt and one completion, given as plain texts.
        files: of the dataset, where its rows are lines of files; `line` tells which of them, by `LINES_OF_A_FILE`.
        left_out: rows that were left out when they were read.
    """

    table: pa.Table
    source: str
    origin: str
    as_written: bool
    files: Sequence[str] = ()
    left_out: int = 0

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def place(self, index: int) -> str:
        """Where row `index` (from 0) stands in its source: `file:line`."""
        return place(self.source, self.table["line"][index].as_py(), self.files)


@dataclass(frozen=True)
class ConversationSplits:
    """All conversations of a run; `as_written` is the same in all of them.

    Attributes:
        train: rows to train on.
        validation: rows for the evaluations of a run, or None.
        test: rows to evaluate once at the end, or None.
        folder: holds the tables as `<split>.arrow`; its name changes with anything that the rows are made from.
        notes: sentences to tell the user: bad rows that were left out, rows in more than one split.
    """

    train: Conversations
    validation: Conversations | None
    test: Conversations | None
    folder: Path
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ChatSource:
    """Where the rows of one split come from, before they are read; `fingerprint` is of the rows as they are stored."""

    name: str
    origin: str
    read: Callable[[BadRows], Iterator[Record]]
    fingerprint: str


def load_conversations(
    args: ChatDataArguments, found: Problems | None = None, sources: Mapping[str, ChatSource] | None = None
) -> ConversationSplits:
    """Read and check all conversations of a run, or take them from the cache.

    A file holds rows of one form, told by their keys: `messages` (role, content), `conversations` (from, value),
    `prompt` and `completion` (texts or lists of messages), or `instruction` and `output` (`input`, `history`);
    `system` may stand beside all but plain texts.

    Args:
        args: how they are read.
        found: problems of the run so far, which refuse it: of long files only the first rows are then read.
        sources: from `sources_of`, where it was asked before.

    Raises:
        UserError: all problems of all files at once, and those of `found`.
    """
    problems = Problems(found or ())
    sources = sources_of(args, problems) if sources is None else sources
    made_from = [[split, src.name, src.origin, src.fingerprint] for split, src in sources.items()]
    parts = [made_from, args.bad_rows, args.max_bad_fraction]
    make = partial(_prepare, sources, args, problems)
    folder = made_once("conversations", parts, "The conversations", make)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    loaded = {
        split: Conversations(map_table(folder / f"{split}.arrow"), *described)
        for split, described in facts["splits"].items()
    }
    return ConversationSplits(loaded["train"], loaded.get("validation"), loaded.get("test"), folder, facts["notes"])


def load_test_conversations(
    path: str, args: BadRowArguments, found: Sequence[str] = ()
) -> tuple[Conversations, Path, list[str]]:
    """Read and check a file of conversations for a model that exists, or take them from the cache.

    Args:
        path: `--test_file`, a json, jsonl or parquet file.
        args: say what becomes of bad rows.
        found: problems of the command so far, which refuse it: of a long file only the first rows are then read.

    Returns:
        The conversations, the folder that holds those that were left out, and notes for the user.

    Raises:
        UserError: all problems of the file at once; or `found`.
    """
    source = _file_source(path, "--test_file")

    def make(folder: Path) -> None:
        refuse_early(Problems(found), [(source.origin, source.read(bad_rows(path, args, folder)))], _CHUNK_ROWS)
        bad = bad_rows(path, args, folder)
        rows = _load(source, folder / "test.arrow", bad)
        notes = [f"{source.origin} {note}" for note in bad.notes()]
        facts = {"as_written": rows.as_written, "left_out": rows.left_out, "notes": notes}
        (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")

    parts = [source.name, source.fingerprint, args.bad_rows, args.max_bad_fraction]
    folder = made_once("test-conversations", parts, "The conversations", make)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    table, left_out = map_table(folder / "test.arrow"), facts["left_out"]
    rows = Conversations(table, source.name, source.origin, facts["as_written"], left_out=left_out)
    return rows, folder, facts["notes"]


def _prepare(sources: Mapping[str, ChatSource], args: ChatDataArguments, problems: Problems, folder: Path) -> None:
    """Write the rows of all splits, and what there is to know of them.

    Args:
        sources: by split.
        args: say what becomes of bad rows.
        problems: found so far.
        folder: gets `<split>.arrow`, `facts.json` and the bad rows.

    Raises:
        UserError: all problems of all files at once.
    """
    heads = ((source.origin, source.read(bad_rows(source.name, args, folder))) for source in sources.values())
    refuse_early(problems, heads, _CHUNK_ROWS)
    loaded: dict[str, Conversations] = {}
    notes: list[str] = []
    for split, source in sources.items():
        bad = bad_rows(source.name, args, folder)
        with problems.collecting():
            loaded[split] = _load(source, folder / f"{split}.arrow", bad)
        notes += [f"{source.origin} {note}" for note in bad.notes()]
    held_out = [loaded[split] for split in SPLITS[1:] if split in loaded]
    if "train" in loaded:
        problems.extend(_differently_written(loaded["train"], held_out))
    problems.raise_any()
    described = {
        split: (rows.source, rows.origin, rows.as_written, rows.files, rows.left_out) for split, rows in loaded.items()
    }
    (folder / _FACTS).write_text(json.dumps({"splits": described, "notes": notes}), encoding="utf-8")


def sources_of(args: ChatDataArguments, problems: Problems) -> dict[str, ChatSource]:
    """The sources of conversations by split; arguments as of `by_split`."""
    return by_split(
        args, problems, lambda name, is_read: _dataset_sources(name, args.dataset_config_name, is_read), _file_source
    )


def is_as_written(source: ChatSource) -> bool | None:
    """Whether the first row is a prompt and a completion, given as plain texts; None where it cannot be used."""
    try:
        _, record = next(source.read(BadRows(source.name)))
        return form_of(record) == PROMPT_TEXTS
    except (UserError, RowError, StopIteration):
        return None


def _file_source(path: str, origin: str) -> ChatSource:
    return ChatSource(path, origin, partial(read_records, path), file_digest(path))


def _dataset_sources(name: str, config: str | None, is_read: bool) -> dict[str, ChatSource]:
    origin = f"--dataset_name {name}"
    if name == BUILTIN_CHATS:
        folder = resources.files("indictune.data") / "samples" / "chats"
        return {split: _file_source(str(folder / f"{split}.jsonl"), origin) for split in SPLITS}
    if name.startswith(BUILTIN_PREFIX):
        raise UserError(f"{origin}: there are no such built-in conversations; expected {BUILTIN_CHATS}.")
    sources: dict[str, ChatSource] = {}
    for split, rows in used_splits(load_hub_dataset(name, config, is_read), origin).items():
        if isinstance(rows, CsvFiles):
            raise UserError(
                f"{origin}: it is made of csv files ({rows.files[0]}); expected {', '.join(RECORD_EXTENSIONS)}. "
                "Write the rows to such a file, and give it by --train_file."
            )
        named = name_of(f"{name}/{split}", rows)
        sources[split] = ChatSource(named, origin, partial(hub_records, rows), fingerprint_of(rows))
    return sources


def _load(source: ChatSource, path: Path, bad: BadRows) -> Conversations:
    """Read and check the rows of one split; `path` gets the table.

    Raises:
        UserError: all problems of the rows at once.
    """
    forms = _Forms()
    with bad.problems.collecting():
        write_table(path, _SCHEMA, shown(_batches(source.read(bad), forms, bad), f"reading {source.name}"))
    bad.problems += forms.problems(bad)
    try:
        bad.finish(map_table(path).num_rows if not bad.problems else 0)
    except UserError as error:
        raise UserError([f"{source.origin} {problem}" for problem in error.problems]) from error
    as_written = PROMPT_TEXTS in forms.first
    return Conversations(map_table(path), source.name, source.origin, as_written, bad.files, bad.count)


class _Forms:
    """The forms of a file's rows: line of the first row, number of rows."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.count: Counter[str] = Counter()

    def add(self, form: str, line: int) -> None:
        self.first.setdefault(form, line)
        self.count[form] += 1

    def problems(self, bad: BadRows) -> Iterator[str]:
        if len(self.first) > 1:
            forms = [
                f"{form} ({self.count[form]}, the first at {bad.place(line)})" for form, line in self.first.items()
            ]
            yield f"{bad.source}: rows of {len(forms)} forms: {', '.join(forms)}; give a file of one form."


def _batches(records: Iterator[Record], forms: _Forms, bad: BadRows) -> Iterator[pa.RecordBatch]:
    rows = _rows(records, forms, bad)
    while chunk := list(islice(rows, _CHUNK_ROWS)):
        yield pa.RecordBatch.from_pylist(chunk, _SCHEMA)


def _rows(records: Iterator[Record], forms: _Forms, bad: BadRows) -> Iterator[dict[str, object]]:
    """Rows of the table. The form of a bad row counts where it stops the run, not where it is left out."""
    for line, record in records:
        form = None
        try:
            form = form_of(record)
            messages = messages_of(record, form)
        except RowError as error:
            bad.add(line, str(error), record, error.kind)
            if isinstance(bad, Quarantine):
                continue
        else:
            yield {"messages": messages, "language": _language(record, messages), "line": line}
        if form is not None:
            forms.add(form, line)


def _language(record: dict[str, object], messages: list[dict[str, str]]) -> str:
    named = record.get("language")
    if isinstance(named, str) and named.strip():
        return without_halves(named.strip())
    return language_of("\n".join(message["content"] for message in messages if message["role"] != "system"))


def _differently_written(train: Conversations, held_out: list[Conversations]) -> Iterator[str]:
    how = {True: "prompt and completion as plain texts", False: "messages between roles"}
    for rows in held_out:
        if rows.as_written != train.as_written:
            yield (
                f"{rows.origin} {rows.source}: holds {how[rows.as_written]}, but {train.origin} {train.source} "
                f"{how[train.as_written]}; write them the same way."
            )


def leak_note(train: Conversations, path: Path, held_out: Conversations) -> str | None:
    """A note about training rows, stored at `path`, that also stand in held-out rows; None where none does."""
    held = pa.chunked_array([_whole_texts(batch) for batch in held_out.table.to_batches()])
    count, batches = 0, stored_batches(path)
    while some := list(islice(batches, _LEAK_BATCHES)):
        texts = pa.chunked_array([_whole_texts(batch) for batch in some])
        count += pc.sum(pc.is_in(texts, value_set=held)).as_py()
    if not count:
        return None
    return (
        f"{train.source}: {count} of {len(train)} training rows also stand in {held_out.source}, whose scores will "
        "look too good; remove them from one of the two."
    )


def _whole_texts(batch: pa.RecordBatch) -> pa.Array:
    """A string a row, equal where the messages are. Their number tells the roles: it is odd where system is first."""
    messages = batch["messages"]
    contents = pa.ListArray.from_arrays(messages.offsets, messages.values.field("content"))
    return pc.binary_join(contents, "\x00")
