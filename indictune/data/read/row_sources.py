"""Find the rows of a run: files, built-in rows or a dataset of the Hub. Nothing is read yet."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import resources
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import DataArguments, SourceArguments
from indictune.config.shared_arguments import TextArguments
from indictune.data.bad_rows import LINES_PER_FILE, BadRows
from indictune.data.cache import with_column
from indictune.data.columns import (
    Wanted,
    check_schema,
    existing_columns,
    numbered_rows,
    shortened,
    text_batches,
    wanted_columns,
    with_labels_of_columns,
)
from indictune.data.labels import MULTI_LABEL, look_like_lists
from indictune.data.read.arrow_files import arrow_errors, named_records, with_class_names
from indictune.data.read.delimited import DELIMITERS
from indictune.data.read.open_files import files_named, saved_splits
from indictune.data.read.read_files import CHUNK_ROWS, Record, SplitFiles, holds_lists
from indictune.errors import Problems, UserError, attributed_to
from indictune.upstream import digest_of_split

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, Features

logger = logging.getLogger(__name__)

FLAG = "--train_files"

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
    files: tuple[str, ...] = ()


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


def _with_languages(
    items: Callable[[BadRows], Iterator[Item]], entries: Sequence[TrainFiles]
) -> Callable[[BadRows], Iterator[Item]]:
    """The same reader; rows without a language get that of their entry."""
    languages = [entry.language for entry in entries for _ in entry.files]

    def read(bad: BadRows) -> Iterator[Item]:
        for item in items(bad):
            yield cast(Item, _filled(item, languages))

    return read if any(languages) else items


def _filled(item: Any, languages: Sequence[str | None]) -> Any:
    """A batch, or a line and its record, with the languages of the files where it has none."""
    if isinstance(item, pa.RecordBatch):
        files = np.maximum(item["line"].to_numpy() // LINES_PER_FILE - 1, 0)
        given, of_entry = item["language"], pa.array(languages, pa.string()).take(pa.array(files))
        is_named = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(given), ""), False)
        return with_column(item, "language", pc.if_else(is_named, given, of_entry))
    line, record = item
    language = languages[max(line // LINES_PER_FILE - 1, 0)]
    return item if record.get("language") or language is None else (line, {**record, "language": language})


_DATASET = "--dataset_name"
_EXTENSIONS = {"csv": (".csv", ".tsv"), "json": (".json", ".jsonl", ".ndjson")}  # by the builder's name
# Settings of `datasets` that change no value.
_HARMLESS = ("name", "version", "description", "data_dir", "data_files", "features", "sep", "chunksize")


@dataclass(frozen=True)
class HubSplit:
    """A split that `datasets` reads; the same as `SplitFiles` in all that is public."""

    rows: Dataset
    files: tuple[str, ...] = ()

    @property
    def split(self) -> str:
        """Its name in the dataset."""
        return str(self.rows.split)

    @property
    def fingerprint(self) -> str:
        """Digest of the content."""
        return digest_of_split(self.rows)

    def batches(self, wanted: Wanted, bad: BadRows) -> Iterator[pa.RecordBatch]:
        """The rows in the form of `read_batches`; class ids become the names that the dataset declares.

        Raises `UserError` if there are no rows, or a column is missing or holds neither text, numbers nor booleans.
        """
        present = existing_columns(self.split, self.rows.column_names, wanted)
        stored = _arrow_batches(self.rows.select_columns(list(dict.fromkeys(present.values()))))
        texts = text_batches(stored, present, wanted, self.split)
        return with_class_names(texts, wanted.roles, _declared(self.rows.features), self.split, bad)

    def records(self, bad: BadRows) -> Iterator[Record]:
        """The rows in the form of `read_records`; class ids become names, in lists too."""
        schema = self.rows.features.arrow_schema
        check_schema(self.split, schema)
        with arrow_errors(self.split):
            yield from named_records(numbered_rows(_arrow_batches(self.rows)), schema)


SplitRows = SplitFiles | HubSplit


def load_hub_dataset(name: str, config: str | None, is_read: bool = True) -> Mapping[str, SplitRows]:
    """The splits of a dataset by name or folder, from the cache if it is there.

    Without `is_read`, it only checks that the dataset exists: nothing is downloaded, no splits are returned.

    Raises:
        UserError: there is no such dataset, the network does not reach it, or it has no training rows.
    """
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    if saved := saved_splits(name):
        return _with_train(name, {split: SplitFiles(files, split) for split, files in saved.items()})
    try:
        builder = datasets.load_dataset_builder(name, config)
        _check_files(name, builder.config.data_files or {})
        if not is_read:
            return {}
        of_files = builder.name in _EXTENSIONS
        if of_files:
            found = _splits_of_files(builder, name)
        else:
            found = {str(split): HubSplit(rows) for split, rows in datasets.load_dataset(name, config).items()}
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UserError("dataset-missing", _DATASET, name) from error
    except (ConnectionError, HfHubHTTPError) as error:
        raise UserError("dataset-unreachable", _DATASET, name) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error  # of "An error occurred while generating the dataset"
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise UserError("dataset-unreadable", _DATASET, name, reason=reason) from error
    _with_train(name, found)
    if not of_files and builder.info.builder_name in _EXTENSIONS:
        raise UserError("dataset-converted", _DATASET, name, kind=builder.info.builder_name)
    return found


def _with_train(name: str, splits: dict[str, SplitRows]) -> dict[str, SplitRows]:
    """The splits, if they have training rows."""
    if "train" not in splits:
        raise UserError("train-split-missing", _DATASET, name, splits=", ".join(map(str, splits)))
    return splits


def _splits_of_files(builder: DatasetBuilder, name: str) -> dict[str, SplitRows]:
    """The splits of a dataset of csv or json files, downloaded unless they are on this machine.

    Raises `UserError` for files of another kind, or settings in its README.md that change what they hold.
    """
    import datasets

    kind, config = builder.name, builder.config
    plain, names = type(config)(), [each.name for each in fields(config) if each.name not in _HARMLESS]
    if changed := sorted(each for each in names if getattr(config, each) != getattr(plain, each)):
        raise UserError("dataset-settings", _DATASET, name, settings=", ".join(changed), kind=kind)
    for file in (file for of_split in config.data_files.values() for file in of_split):
        extension = Path(file).suffix.lower()
        if extension not in _EXTENSIONS[kind] or (kind == "csv" and DELIMITERS[extension] != config.sep):
            raise UserError("dataset-file-kind", _DATASET, name, file=file, expected=", ".join(_EXTENSIONS[kind]))
    declared = _declared(builder.info.features or {})
    files = datasets.DownloadManager().download(config.data_files)
    return {str(split): SplitFiles(tuple(of_split), str(split), declared) for split, of_split in files.items()}


def _declared(features: Features | Mapping[str, Any]) -> dict[str, Sequence[str]]:
    import datasets

    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def _check_files(name: str, files: Mapping[str, Sequence[str]]) -> None:
    """Refuse a dataset whose README.md names files outside it. `datasets` 5 reads them, wherever they are.

    The files of each split are paths, or `hf://datasets/OWNER/NAME@COMMIT/PATH`.
    """
    folder = Path(name).resolve()
    named = dict.fromkeys(chain.from_iterable(files.values()))
    if folder.is_dir():
        outside = [file for file in named if not Path(file).resolve().is_relative_to(folder)]
    else:
        begin = f"hf://datasets/{name}@"
        outside = [file for file in named if not file.startswith(begin) or ".." in PurePosixPath(file).parts]
    if outside:
        raise UserError("dataset-files-outside", _DATASET, name, files=", ".join(map(repr, outside[:3])))


def _arrow_batches(rows: Dataset) -> Iterator[pa.RecordBatch]:
    if not len(rows):
        raise UserError("no-rows", value=rows.split)
    for table in rows.with_format("arrow").iter(CHUNK_ROWS):
        yield from table.combine_chunks().to_batches()


# Name of a built-in dataset -> its folder in `indictune/data`, with a jsonl file for each split.
BUILTIN = {"builtin:tweets": "samples", "builtin:chats": "samples/chats", "builtin:names": "samples/names"}
SPLITS = ("train", "validation", "test")

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
        if holds_lists(files_named(named, "train")[1][0], args.label_column):
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
        files = builtin_files(builtin)
        sources = {split: file_source(file, origin, read) for split, file in files.items()}
    elif name is not None:
        with problems.collecting():
            if name.startswith("builtin:"):
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
    """The rows of the files that the flag `origin` named for a split; raises as `files_named`."""
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

    Those of the `first` items of each source are raised too, to report missing files and columns.
    """
    early, are_long = Problems(found), False
    for source in sources if found else ():
        with early.collecting(), attributed_to(source.origin):
            are_long |= len(list(islice(source.read(BadRows(source.name)), first + 1))) > first
    if are_long:
        logger.warning("Reading only the first rows, because the run is refused in any case.")
        early.raise_any()
