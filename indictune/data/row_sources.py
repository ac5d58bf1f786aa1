"""Where the rows of a run come from, before they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import islice
from typing import TypeVar

import pyarrow as pa

from indictune.config.arguments import DataArguments, SourceArguments, TextArguments
from indictune.data.bad_rows import BadRows
from indictune.data.cache import file_digest
from indictune.data.columns import shortened
from indictune.data.hub_datasets import fingerprint_of, hub_batches, load_hub_dataset, name_of
from indictune.data.read_files import read_batches
from indictune.errors import Problems, UserError

logger = logging.getLogger(__name__)

Each = TypeVar("Each")

BUILTIN_PREFIX = "builtin:"
BUILTIN_DATASETS = {"builtin:tweets": "samples"}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Source:
    """One split.

    Attributes:
        name: as messages name it.
        origin: the flag and value that named it.
        read: its rows; those that cannot be read go to the bad ones.
        fingerprint: of the rows as they are stored.
        may_lack_labels: a dataset's own test rows; without labels they are left out.
    """

    name: str
    origin: str
    read: Callable[[BadRows], Iterator[pa.RecordBatch]]
    fingerprint: str
    may_lack_labels: bool = False


def columns_of(args: TextArguments) -> tuple[dict[str, str], dict[str, str]]:
    """Role to column name of a file or dataset: of the columns that must be there, and of those that may be."""
    columns = {"text": args.text_column, "label": args.label_column}
    if args.language_column is not None:
        return columns | {"language": args.language_column}, {}
    return columns, {"language": "language"}


def sources_of(args: DataArguments, problems: Problems) -> dict[str, Source]:
    """The sources of tweets by split; arguments as of `by_split`."""
    return by_split(
        args,
        problems,
        lambda name, is_read: (
            _builtin_sources(args) if name.startswith(BUILTIN_PREFIX) else _hub_sources(args, is_read)
        ),
        lambda path, origin: file_source(path, origin, args),
    )


def by_split(
    args: SourceArguments,
    problems: Problems,
    of_dataset: Callable[[str, bool], dict[str, Each]],
    of_file: Callable[[str, str], Each],
) -> dict[str, Each]:
    """The sources by split; files named by flags take the place of the dataset's own validation and test rows.

    Args:
        args: name the rows.
        problems: get a dataset that cannot be found; of a file, reading it tells. Where there are any, nothing is
            downloaded.
        of_dataset: the sources of a dataset of this name; it is only looked for, or read too.
        of_file: the source of a file that a flag named, which comes second.
    """
    sources: dict[str, Each] = {}
    if args.dataset_name is not None:
        with problems.collecting():
            sources = of_dataset(args.dataset_name, not problems)
    for split in SPLITS:
        path = getattr(args, f"{split}_file")
        if path is not None:
            sources[split] = of_file(path, f"--{split}_file")
    return sources


def used_splits(found: Mapping[str, Each], origin: str) -> dict[str, Each]:
    """Of a dataset's splits those that a run reads; a warning names the others.

    Args:
        found: the rows of all splits.
        origin: the flag and value that named the dataset.
    """
    unused = [split for split in found if split not in SPLITS]
    if unused:
        logger.warning(
            "%s: its rows of %s are not used, but those of %s. Write them to a file to give them by --validation_file "
            "or --test_file.",
            origin,
            ", ".join(map(shortened, unused)),
            " and ".join(split for split in SPLITS if split in found),
        )
    return {split: found[split] for split in SPLITS if split in found}


def refuse_early(found: Problems, heads: Iterable[tuple[str, Iterator[object]]], first: int) -> None:
    """Raise the problems found before any row was read, if there are any and reading all rows would take long.

    Args:
        found: the problems.
        heads: origin of each source and what it reads, rows or batches of them.
        first: so many of each are read, because they tell of files and columns that are not there.

    Raises:
        UserError: `found`, with what the first rows tell.
    """
    if not found:
        return
    problems, are_long = Problems(found), False
    for origin, read in heads:
        try:
            are_long |= len(list(islice(read, first + 1))) > first
        except UserError as error:
            problems.extend(f"{origin} {problem}" for problem in error.problems)
    if are_long:
        logger.warning("Of the rows only the first were read, for the run is refused in any case.")
        problems.raise_any()


def file_source(path: str, origin: str, args: TextArguments) -> Source:
    """The rows of a file that the flag `origin` named."""
    return Source(path, origin, partial(read_batches, path, *columns_of(args)), file_digest(path))


def _builtin_sources(args: DataArguments) -> dict[str, Source]:
    origin = f"--dataset_name {args.dataset_name}"
    folder = BUILTIN_DATASETS.get(args.dataset_name or "")
    if folder is None:
        raise UserError(f"{origin}: there is no such built-in dataset; expected {' or '.join(BUILTIN_DATASETS)}.")
    files = resources.files("indictune.data") / folder
    return {split: file_source(str(files / f"{split}.jsonl"), origin, args) for split in SPLITS}


def _hub_sources(args: DataArguments, is_read: bool) -> dict[str, Source]:
    name, origin = str(args.dataset_name), f"--dataset_name {args.dataset_name}"
    found = load_hub_dataset(name, args.dataset_config_name, is_read)
    return {
        split: Source(
            name_of(f"{name}/{split}", rows),
            origin,
            partial(hub_batches, rows, *columns_of(args)),
            fingerprint_of(rows),
            split == "test",
        )
        for split, rows in used_splits(found, origin).items()
    }
