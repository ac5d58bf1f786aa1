"""Find the rows of a run: files, built-in rows or a dataset of the Hub. Nothing is read yet."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from indictune.data.columns import shortened, wanted_columns, with_labels_of_columns, with_language
from indictune.data.labels import MULTI_LABEL, look_like_lists
from indictune.data.languages import language_named
from indictune.data.read.hub_datasets import HubSplit, load_hub_dataset
from indictune.data.read.open_files import files_named
from indictune.data.read.read_files import SplitFiles, holds_lists
from indictune.errors import Problems, UserError, attributed_to, problem

logger = logging.getLogger(__name__)

FLAG = "--train_files"

SPLITS = ("train", "validation", "test")

Item = TypeVar("Item")


@dataclass(frozen=True)
class TrainFiles:
    """Some files of training rows, named by a file, a pattern, or a folder of a saved dataset.

    Each row comes `weight` times in an epoch, before languages are balanced. Rows that name no language have
    `language`; None detects it.
    """

    path: str
    weight: float = 1.0
    language: str | None = None
    files: Mapping[str, str | None] = field(default_factory=dict)  # with the languages that stand in their names


def entries_of(words: Sequence[str]) -> tuple[TrainFiles, ...]:
    """The entries, each a path or `{"path": "a.csv", "weight": 2, "language": "hi"}`; `UserError` for bad ones."""
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
    except (ValueError, RecursionError) as error:
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


# Name of a built-in dataset -> its folder in `indictune/data`, with a jsonl file for each split.
BUILTIN = {"builtin:tweets": "samples", "builtin:chats": "samples/chats", "builtin:names": "samples/names"}
SplitRows = SplitFiles | HubSplit
Read = Callable[[SplitRows, BadRows], Iterator[Item]]


@dataclass(frozen=True)
class Source(Generic[Item]):
    """Where the rows of one split come from.

    Attributes:
        name: of the file or split, as messages name it; `origin` is the flag that named it.
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
    required = dict(wanted.required)
    if "label" not in required:
        return lambda rows, bad: (with_labels_of_columns(batch, bad) for batch in rows.batches(wanted, bad))
    of_test = replace(wanted, optional={**wanted.optional, "label": required.pop("label")}, required=required)
    return lambda rows, bad: rows.batches(of_test if rows.split == "test" else wanted, bad)


def text_sources(args: DataArguments, problems: Problems) -> dict[str, Source[pa.RecordBatch]]:
    """The sources of labelled texts by split; arguments as of `sources_by_split`."""
    return sources_by_split(args, problems, "builtin:tweets", text_reader(args, args.problem_type))


def gives_lists_of_labels(args: DataArguments) -> bool:
    """Whether the first rows of the training files look as if each had several labels; False if none can be read."""
    if not isinstance(args.label_column, str):
        return True
    with Problems().collecting():  # they are reported when all rows are read
        named = args.train_file or [file for each in entries_of(args.train_files) for file in each.files]
        if not named:
            return False
        if holds_lists(next(iter(files_named(named, "train")[1])), args.label_column):
            return True
        source = file_source(named, "--train_file", text_reader(args, None), "train")
        first = next(source.read(BadRows(source.name)), None)
        return first is not None and look_like_lists(set(first["label"].to_pylist()) - {None})
    return False


def sources_by_split(
    args: SourceArguments, problems: Problems, builtin: str, read: Read[Item]
) -> dict[str, Source[Item]]:
    """The sources by split. A file that a flag names replaces the dataset's own split.

    `problems` get a dataset that cannot be found; if there are some already, nothing is downloaded. A missing file is
    reported when it is read.
    """
    sources: dict[str, Source[Item]] = {}
    name = args.dataset_name
    origin = f"--dataset_name {name}"
    if name == builtin:
        folder = Path(str(resources.files("indictune.data"))) / BUILTIN[name]
        files = {split: folder / f"{split}.jsonl" for split in SPLITS}
        sources = {split: file_source(str(file), origin, read) for split, file in files.items() if file.is_file()}
    elif name is not None:
        with problems.collecting():
            if name.startswith("builtin:"):
                raise UserError("no-such-name", "--dataset_name", name, kind="built-in dataset", known=builtin)
            sources = _of_dataset(args, read, is_read=not problems)
    if args.train_files:
        with problems.collecting():
            sources["train"] = _weighted_source(args.train_files, read)
    for split in SPLITS:
        if named := getattr(args, f"{split}_file"):
            with problems.collecting():
                sources[split] = file_source(named, f"--{split}_file", read, split)
    return sources


_PART = re.compile(
    r"(?:(?P<config>[^/+\[\]]+)/)?(?P<split>[^/+\[\]:]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?"
)
_ALL = 1 << 62  # more rows than any split has


@dataclass(frozen=True)
class SplitPart:
    """What a run takes of a split: `hi`, `train[:90%]` or `CONFIG/train[100:]`, as `datasets` writes them.

    `start` and `stop` are numbers of rows, or shares such as `90%`; negative ones count from the end.
    """

    split: str
    config: str | None = None
    start: str | None = None
    stop: str | None = None

    def bounds(self, count: Callable[[], int]) -> tuple[int, int]:
        """The first row, and the one after the last, of a split of `count` rows; shares are rounded."""
        first, end = self.start or "0", self.stop or str(_ALL)
        rows = count() if re.search("[-%]", first + end) else _ALL
        numbers = [round(int(each[:-1]) * rows / 100) if each.endswith("%") else int(each) for each in (first, end)]
        begin, stop = (min(max(each + rows if each < 0 else each, 0), rows) for each in numbers)
        return begin, stop


def parts_named(words: Sequence[str]) -> dict[str, list[SplitPart]]:
    """Split of the run -> parts, of words such as `validation=hi[:10%]+te`; `UserError` for every other word."""
    problems, found = Problems(), dict[str, list[SplitPart]]()
    for word in words:
        split, _, parts = word.partition("=")
        matches = [_PART.fullmatch(each.strip()) for each in parts.split("+")]
        with problems.collecting():
            if split not in SPLITS or split in found or None in matches:
                raise UserError("dataset-splits-form", "--dataset_splits", word)
            found[split] = [SplitPart(**match.groupdict()) for match in matches if match is not None]
    problems.raise_any()
    return found


def _of_dataset(args: SourceArguments, read: Read[Item], is_read: bool) -> dict[str, Source[Item]]:
    """The sources of `--dataset_name`, as its flags name configurations and parts; none without `is_read`."""
    named, parts, problems = args.dataset_config_name, parts_named(args.dataset_splits), Problems()
    own = [part.config for of_split in parts.values() for part in of_split if part.config is not None]
    words: list[str | None] = [*named] if isinstance(named, list) else [named]
    if named is None and "train" in parts and len(own) == sum(map(len, parts.values())):
        words = []  # each part names its own
    name, revision = str(args.dataset_name), args.dataset_revision
    found = {each: load_hub_dataset(name, each, revision, is_read) for each in dict.fromkeys([*words, *own])}
    sources, used = dict[str, Source[Item]](), set[tuple[str | None, str]]()
    for split in SPLITS if is_read else ():
        taken, lacking = list[_Taken](), list[str]()
        for part in parts.get(split, [SplitPart(split)]):
            for config in words if part.config is None else [part.config]:
                shown, splits = "/".join(filter(None, (name, config, part.split))), ", ".join(found[config])
                if part.split in found[config]:
                    language = language_named(config or "") or language_named(part.split)
                    if language is None and len(words) > 1:
                        logger.warning(
                            "--dataset_config_name %s names no language: scripts tell those of rows.", config
                        )
                    taken.append((found[config][part.split], part, shown, language))
                    used.add((config, part.split))
                elif split in parts:
                    problems.append(problem("dataset-split-missing", "--dataset_splits", shown, splits=splits))
                elif split == "train":
                    details = {"splits": splits, "example": next(iter(found[config]), "NAME")}
                    problems.append(problem("train-split-missing", "--dataset_name", name, **details))
                else:
                    lacking.append(str(config))
        if taken and lacking:
            logger.warning("--dataset_name %s: no %s rows in %s.", name, split, ", ".join(lacking))
        sources |= {split: _of_parts(name, split, taken, read)} if taken else {}
    problems.raise_any()
    unused = {split: None for config in words for split in found[config] if (config, split) not in used}
    if unused and is_read:
        logger.warning("--dataset_name %s: ignoring its rows of %s.", name, ", ".join(map(shortened, unused)))
    return sources


# The split of a part, the part, its name in messages, and the language of its rows that have none, if it is known.
_Taken = tuple[SplitRows, SplitPart, str, str | None]


def _of_parts(name: str, split: str, taken: Sequence[_Taken], read: Read[Item]) -> Source[Item]:
    rows, part, _, language = taken[0]
    origin, is_own_test = f"--dataset_name {name}", all(each.split == split == "test" for each, *_ in taken)
    if len(taken) == 1 and part in (SplitPart(part.split), SplitPart(part.split, part.config)) and language is None:
        shown = rows.files[0] if len(rows.files) == 1 else f"{name}/{part.split}"
        return Source(shown, origin, partial(read, rows), rows.fingerprint, is_own_test)
    fingerprint = repr([(rows.fingerprint, *rest) for rows, *rest in taken])
    return Source(f"{name}/{split}", origin, partial(_joined, read, taken), fingerprint, is_own_test)


def _joined(read: Read[Item], taken: Sequence[_Taken], bad: BadRows) -> Iterator[Item]:
    """The rows of all parts, one part after the other."""
    for rows, part, name, language in taken:
        first, end = part.bounds(partial(_count, read, rows))
        bad.files += [] if rows.files[1:] else [*rows.files, name][:1]  # several files name themselves
        offset, row = 0 if rows.files else len(bad.files) * LINES_PER_FILE, 0
        for item in read(rows, bad):
            length = _length(item)
            if first < row + length and row < end:
                yield with_language(_moved(item, max(first - row, 0), end - row, offset), language)
            row += length


def _count(read: Read[Any], rows: SplitRows) -> int:
    return sum(map(_length, read(rows, BadRows(""))))


def _length(item: object) -> int:
    return len(item) if isinstance(item, pa.RecordBatch) else 1


def _moved(item: Any, first: int, end: int, offset: int) -> Any:
    """Some rows of a batch, or a line and its record, with another number to each line."""
    if isinstance(item, pa.RecordBatch):
        some = item.slice(first, end - first)
        return with_column(some, "line", pc.add(some["line"], offset))
    return offset + item[0], item[1]


def file_source(named: str | Sequence[str], origin: str, read: Read[Item], split: str = "test") -> Source[Item]:
    """The rows of the files that the flag `origin` named for a split; raises as `files_named`."""
    with attributed_to(origin):
        name, files = files_named(named, split)
    return _of_files(name, origin, read, files)


def _weighted_source(words: Sequence[str], read: Read[Item]) -> Source[Item]:
    with attributed_to(FLAG):
        entries = entries_of(words)
    files = {file: language or entry.language for entry in entries for file, language in entry.files.items()}
    name = entries[0].path + (f" and {len(entries) - 1} more" if entries[1:] else "")
    return _of_files(name, FLAG, read, files, entries)


def _of_files(
    name: str, origin: str, read: Read[Item], files: Mapping[str, str | None], entries: tuple[TrainFiles, ...] = ()
) -> Source[Item]:
    """The source of some files. Rows without a language get that of their file; a batch is of one file."""
    rows, languages = SplitFiles(tuple(files)), list(files.values())

    def read_with_languages(bad: BadRows) -> Iterator[Item]:
        for item in read(rows, bad):
            line = item["line"][0].as_py() if isinstance(item, pa.RecordBatch) else cast(Any, item)[0]
            yield cast(Item, with_language(item, languages[max(line // LINES_PER_FILE - 1, 0)]))

    reader = read_with_languages if any(languages) else partial(read, rows)
    return Source(name, origin, reader, f"{rows.fingerprint} {languages} {entries}", entries=entries)


def refuse_early(found: Problems, sources: Iterable[Source[Any]], first: int) -> None:
    """Raise problems that were found before any row was read, if reading all rows would take long.

    Those of the `first` items of each source are raised too, to report missing files and columns.
    """
    early, are_long = Problems(found), False
    for source in sources if found else ():
        with early.collecting(), attributed_to(source.origin):
            are_long |= len(list(islice(source.read(BadRows(source.name)), first + 1))) > first
    if are_long:
        logger.warning("Reading only the first rows, because the run is refused in any case.")
        early.raise_any()
