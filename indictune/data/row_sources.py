"""Find the rows of a run: files, built-in rows or a dataset of the Hub. Nothing is read yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow as pa

from indictune.config.arguments import DataArguments, SourceArguments, TextArguments
from indictune.data.bad_rows import BadRows
from indictune.data.columns import shortened
from indictune.data.hub_datasets import SplitFiles, SplitRows, fingerprint_of, load_hub_dataset, name_of
from indictune.data.split_rows import split_batches
from indictune.data.targets import MULTI_LABEL
from indictune.errors import Problems, UserError, attributed_to

logger = logging.getLogger(__name__)

BUILTIN_PREFIX = "builtin:"
SPLITS = ("train", "validation", "test")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reader(Generic[Item]):
    """How one kind of rows is read.

    Attributes:
        builtin: name of the built-in dataset of this kind.
        builtin_folder: its folder in `indictune/data`, with a jsonl file for each split.
        read: reads a split; rows that cannot be read go to the bad rows.
    """

    builtin: str
    builtin_folder: str
    read: Callable[[SplitRows, BadRows], Iterator[Item]]


@dataclass(frozen=True)
class Source(Generic[Item]):
    """Where the rows of one split come from.

    Attributes:
        name: of the file or split, as messages name it.
        origin: the flag that named it.
        read: yields its rows; rows that cannot be read go to the bad rows.
        fingerprint: of the rows as they are stored.
        may_lack_labels: True for a dataset's own test rows, which are left out if they have no labels.
    """

    name: str
    origin: str
    read: Callable[[BadRows], Iterator[Item]]
    fingerprint: str
    may_lack_labels: bool = False


def columns_of(args: TextArguments) -> tuple[dict[str, str], dict[str, str]]:
    """Role -> column name: of the columns that a file must have, and of those that it may have."""
    columns = {"text": args.text_column, "label": args.label_column}
    if args.language_column is not None:
        return columns | {"language": args.language_column}, {}
    return columns, {"language": "language"}


def text_reader(args: TextArguments, problem_type: str | None) -> Reader[pa.RecordBatch]:
    """Read labelled texts; only a row of several labels may hold a list of them."""
    columns, optional = columns_of(args)
    lists = [args.label_column] if problem_type == MULTI_LABEL else []
    read = partial(split_batches, columns=columns, optional=optional, lists=lists)
    return Reader("builtin:tweets", "samples", read)


def sources_of(args: DataArguments, problems: Problems) -> dict[str, Source[pa.RecordBatch]]:
    """The sources of labelled texts by split; arguments as of `sources_by_split`."""
    return sources_by_split(args, problems, text_reader(args, args.problem_type))


def sources_by_split(args: SourceArguments, problems: Problems, reader: Reader[Item]) -> dict[str, Source[Item]]:
    """The sources by split. A file that a flag names replaces the dataset's own split.

    Args:
        args: name the rows.
        problems: get a dataset that cannot be found. A missing file is reported when it is read. Nothing is downloaded
            if there are problems already.
        reader: of the rows.
    """
    sources: dict[str, Source[Item]] = {}
    if args.dataset_name is not None:
        with problems.collecting():
            sources = _dataset_sources(args.dataset_name, args.dataset_config_name, reader, is_read=not problems)
    for split in SPLITS:
        path = getattr(args, f"{split}_file")
        if path is not None:
            sources[split] = file_source(path, f"--{split}_file", reader)
    return sources


def file_source(path: str, origin: str, reader: Reader[Item]) -> Source[Item]:
    """The rows of a file that the flag `origin` named."""
    return _source(path, origin, SplitFiles((path,)), reader)


def _source(name: str, origin: str, rows: SplitRows, reader: Reader[Item]) -> Source[Item]:
    is_test = str(rows.split) == "test"
    return Source(name_of(name, rows), origin, partial(reader.read, rows), fingerprint_of(rows), is_test)


def _dataset_sources(name: str, config: str | None, reader: Reader[Item], is_read: bool) -> dict[str, Source[Item]]:
    origin = f"--dataset_name {name}"
    if name == reader.builtin:
        folder = Path(str(resources.files("indictune.data"))) / reader.builtin_folder
        return {split: file_source(str(folder / f"{split}.jsonl"), origin, reader) for split in SPLITS}
    if name.startswith(BUILTIN_PREFIX):
        raise UserError("builtin-dataset-unknown", "--dataset_name", name, expected=reader.builtin)
    found = load_hub_dataset(name, config, is_read)
    used = [split for split in SPLITS if split in found]
    if unused := [shortened(split) for split in found if split not in SPLITS]:
        logger.warning("%s: ignoring its rows of %s; using those of %s.", origin, ", ".join(unused), ", ".join(used))
    return {split: _source(f"{name}/{split}", origin, found[split], reader) for split in used}


def refuse_early(found: Problems, sources: Iterable[Source[Any]], first: int) -> None:
    """Raise problems that were found before any row was read, if reading all rows would take long.

    Args:
        found: the problems. Without any, nothing is read.
        sources: of the rows.
        first: number of items to read of each source, to report missing files and columns too.

    Raises:
        UserError: `found`, and the problems of the first rows.
    """
    if not found:
        return
    problems, are_long = Problems(found), False
    for source in sources:
        with problems.collecting(), attributed_to(source.origin):
            are_long |= len(list(islice(source.read(BadRows(source.name)), first + 1))) > first
    if are_long:
        logger.warning("Reading only the first rows, because the run is refused in any case.")
        problems.raise_any()
