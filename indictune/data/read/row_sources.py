"""Find the rows of a run: files, built-in rows or a dataset of the Hub. Nothing is read yet."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import DataArguments, SourceArguments
from indictune.config.shared_arguments import TextArguments
from indictune.data.bad_rows import LINES_PER_FILE, BadRows
from indictune.data.cache import with_column
from indictune.data.columns import shortened, wanted_columns
from indictune.data.labels import MULTI_LABEL, look_like_lists
from indictune.data.read.hub_datasets import SplitRows, load_hub_dataset
from indictune.data.read.open_files import files_named
from indictune.data.read.read_files import SplitFiles
from indictune.errors import Problems, UserError, attributed_to

logger = logging.getLogger(__name__)

FLAG = "--train_files"

Item = TypeVar("Item")


@dataclass(frozen=True)
class TrainFiles:
    """Some files of training rows.

    Attributes:
        path: a file, a pattern, or a folder of a saved dataset.
        weight: how often each of their rows comes in an epoch, before languages are balanced.
        language: of rows that name none; None detects it.
    """

    path: str
    weight: float = 1.0
    language: str | None = None
    files: tuple[str, ...] = ()


def entries_of(words: Sequence[str]) -> tuple[TrainFiles, ...]:
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


def _entry(word: str) -> TrainFiles:
    try:
        given = dict(json.loads(word)) if word.lstrip().startswith("{") else {"path": word}
    except ValueError as error:
        raise UserError("train-files-entry", FLAG, word) from error
    path, weight, language = given.get("path"), given.get("weight", 1), given.get("language")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < float("inf")
    named = [isinstance(path, str) and path, is_number, language is None or (isinstance(language, str) and language)]
    if given.keys() - {"path", "weight", "language"} or not all(named):
        raise UserError("train-files-entry", FLAG, word)
    assert isinstance(path, str)
    return TrainFiles(path, float(weight), language, files_named(path, "train")[1])


def entry_numbers(lines: pa.ChunkedArray, entries: Sequence[TrainFiles]) -> np.ndarray:
    """The number of each row's entry, int64 [rows], from the `line` of a `StoredRows`."""
    by_file = np.repeat(np.arange(len(entries)), [len(entry.files) for entry in entries])
    file = np.maximum(lines.to_numpy() // LINES_PER_FILE - 1, 0)
    return cast(np.ndarray, by_file[file])


def _with_languages(
    items: Callable[[BadRows], Iterator[Item]], entries: Sequence[TrainFiles]
) -> Callable[[BadRows], Iterator[Item]]:
    """The same reader; rows without a language get that of their entry."""
    languages = [entry.language for entry in entries for _ in entry.files]

    def read(bad: BadRows) -> Iterator[Item]:
        for item in items(bad):
            yield cast(Item, _batch(item, languages) if isinstance(item, pa.RecordBatch) else _record(item, languages))

    return read if any(languages) else items


def _batch(batch: pa.RecordBatch, languages: Sequence[str | None]) -> pa.RecordBatch:
    files = np.maximum(batch["line"].to_numpy() // LINES_PER_FILE - 1, 0)
    of_entry = pa.array(languages, pa.string()).take(pa.array(files))
    given = batch["language"]
    is_named = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(given), ""), False)
    return with_column(batch, "language", pc.if_else(is_named, given, of_entry))


def _record(item: Any, languages: Sequence[str | None]) -> tuple[int, dict[str, object]]:
    line, record = item
    language = languages[max(line // LINES_PER_FILE - 1, 0)]
    return (line, record) if record.get("language") or language is None else (line, {**record, "language": language})


BUILTIN_PREFIX = "builtin:"
# Name of a built-in dataset -> its folder in `indictune/data`, with a jsonl file for each split.
BUILTIN = {"builtin:tweets": "samples", "builtin:chats": "samples/chats", "builtin:names": "samples/names"}
SPLITS = ("train", "validation", "test")

Read = Callable[[SplitRows, BadRows], Iterator[Item]]


@dataclass(frozen=True)
class Source(Generic[Item]):
    """Where the rows of one split come from.

    Attributes:
        name: of the file or split, as messages name it.
        origin: the flag that named it.
        read: yields its rows; rows that cannot be read go to the bad rows.
        fingerprint: of the rows as they are stored.
        may_lack_labels: True for a dataset's own test rows, which are left out if they have no labels.
        entries: of `--train_files`, if it names the rows.
    """

    name: str
    origin: str
    read: Callable[[BadRows], Iterator[Item]]
    fingerprint: str
    may_lack_labels: bool = False
    entries: tuple[TrainFiles, ...] = ()


def text_reader(args: TextArguments, problem_type: str | None) -> Read[pa.RecordBatch]:
    """Read labelled texts. Only rows of several labels may hold lists. The test split of a dataset may lack labels."""
    wanted = wanted_columns(args, *(["label"] if problem_type == MULTI_LABEL else []))
    required, label = dict(wanted.required), {"label": wanted.required["label"]}
    del required["label"]
    of_test = replace(wanted, required=required, optional={**wanted.optional, **label})
    return lambda rows, bad: rows.batches(of_test if rows.split == "test" else wanted, bad)


def text_sources(args: DataArguments, problems: Problems) -> dict[str, Source[pa.RecordBatch]]:
    """The sources of labelled texts by split; arguments as of `sources_by_split`."""
    return sources_by_split(args, problems, "builtin:tweets", text_reader(args, args.problem_type))


def gives_lists_of_labels(args: DataArguments) -> bool:
    """Whether the first rows of `--train_file` look as if each had several labels; False if they cannot be read."""
    if not args.train_file:
        return False
    with Problems().collecting():  # they are reported when all rows are read
        source = file_source(args.train_file, "--train_file", text_reader(args, None), "train")
        first = next(source.read(BadRows(source.name)), None)
        return first is not None and look_like_lists(set(first["label"].to_pylist()) - {None})
    return False


def sources_by_split(
    args: SourceArguments, problems: Problems, builtin: str, read: Read[Item]
) -> dict[str, Source[Item]]:
    """The sources by split. A file that a flag names replaces the dataset's own split.

    Args:
        problems: get a dataset that cannot be found. A missing file is reported when it is read. Nothing is downloaded
            if there are problems already.
    """
    sources: dict[str, Source[Item]] = {}
    name = args.dataset_name
    origin = f"--dataset_name {name}"
    if name == builtin:
        files = builtin_files(builtin)
        sources = {split: file_source(file, origin, read) for split, file in files.items()}
    elif name is not None:
        with problems.collecting():
            if name.startswith(BUILTIN_PREFIX):
                raise UserError("no-such-name", "--dataset_name", name, kind="built-in dataset", known=builtin)
            found = load_hub_dataset(name, args.dataset_config_name, is_read=not problems)
            if unused := [shortened(split) for split in found if split not in SPLITS]:
                logger.warning("%s: ignoring its rows of %s.", origin, ", ".join(unused))
            for split in (split for split in SPLITS if split in found):
                rows, is_test = found[split], split == "test"
                shown = rows.files[0] if len(rows.files) == 1 else f"{name}/{split}"
                sources[split] = Source(shown, origin, partial(read, rows), rows.fingerprint, is_test)
    if args.train_files:
        with problems.collecting():
            sources["train"] = _weighted_source(args.train_files, read)
    for split in SPLITS:
        if named := getattr(args, f"{split}_file"):
            with problems.collecting():
                sources[split] = file_source(named, f"--{split}_file", read, split)
    return sources


def builtin_files(name: str) -> dict[str, str]:
    """The file of each split of a built-in dataset."""
    folder = Path(str(resources.files("indictune.data"))) / BUILTIN[name]
    return {split: str(file) for split in SPLITS if (file := folder / f"{split}.jsonl").is_file()}


def file_source(named: str | Sequence[str], origin: str, read: Read[Item], split: str = "test") -> Source[Item]:
    """The rows of the files that the flag `origin` named for a split.

    Raises:
        UserError: a pattern matches no file, or a folder is no saved dataset.
    """
    with attributed_to(origin):
        name, files = files_named(named, split)
    rows = SplitFiles(files)
    return Source(name, origin, partial(read, rows), rows.fingerprint)


def _weighted_source(words: Sequence[str], read: Read[Item]) -> Source[Item]:
    with attributed_to(FLAG):
        entries = entries_of(words)
    rows = SplitFiles(tuple(file for entry in entries for file in entry.files))
    name = entries[0].path + (f" and {len(entries) - 1} more" if entries[1:] else "")
    languages = _with_languages(partial(read, rows), entries)
    return Source(name, FLAG, languages, f"{rows.fingerprint} {entries}", entries=entries)


def refuse_early(found: Problems, sources: Iterable[Source[Any]], first: int) -> None:
    """Raise problems that were found before any row was read, if reading all rows would take long.

    The `first` items of each source are read, to report missing files and columns too.

    Raises:
        UserError: `found`, and the problems of the first rows.
    """
    early, are_long = Problems(found), False
    for source in sources if found else ():
        with early.collecting(), attributed_to(source.origin):
            are_long |= len(list(islice(source.read(BadRows(source.name)), first + 1))) > first
    if are_long:
        logger.warning("Reading only the first rows, because the run is refused in any case.")
        early.raise_any()
