"""The rows of a run: read, cleaned, given a language, and checked before anything expensive starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources

import pyarrow as pa
import pyarrow.compute as pc

from indictune.arguments import DataArguments, TextArguments
from indictune.data.cleaning import clean
from indictune.data.columns import normalise_label, shortened
from indictune.data.hub import hub_batches, load_hub_dataset
from indictune.data.languages import language_of
from indictune.data.reading import place, read_batches
from indictune.errors import Problems, UserError

logger = logging.getLogger(__name__)

BUILTIN_PREFIX = "builtin:"
BUILTIN_DATASETS = {"builtin:tweets": "samples"}
SPLITS = ("train", "validation", "test")

_MAX_IDS = 20
_MAX_LABELS = 1000
_MAX_LISTED = 5
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Attributes:
        table: columns `text` (cleaned, never empty), `label`, `language` (strings without nulls), `line` (int32: line
            of the file, or number of the row in a parquet file or dataset, from 1).
        source: the file or dataset they come from, as messages name it.
        origin: the flag and value that named it.
    """

    table: pa.Table
    source: str
    origin: str

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def place(self, index: int) -> str:
        """Where row `index` (from 0) stands in its source: `file:line`."""
        return place(self.source, self.table["line"][index].as_py())


@dataclass(frozen=True)
class Splits:
    """All rows of a run.

    Attributes:
        train: rows to train on.
        validation: rows for the evaluations of a run, or None.
        test: rows to evaluate once at the end, or None.
        labels: labels of the training rows, in numerical order if all are numbers, else in alphabetical order. A
            label's position is its class id.
        notes: sentences to tell the user: empty rows that were dropped, rows in more than one split.
    """

    train: Rows
    validation: Rows | None
    test: Rows | None
    labels: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Source:
    """Where the rows of one split come from, before they are read."""

    name: str
    origin: str
    read: Callable[[], Iterator[pa.RecordBatch]]
    may_lack_labels: bool = False


def load_splits(args: DataArguments) -> Splits:
    """Read, clean and check all rows of a run.

    Files named by flags take the place of the dataset's own validation and test rows.

    Raises:
        UserError: all problems of all files and labels at once.
    """
    problems = Problems()
    notes: list[str] = []
    loaded: dict[str, Rows] = {}
    for split, source in _sources(args, problems).items():
        with problems.collecting():
            rows = _cleaned(source, args, notes)
            if rows is not None:
                loaded[split] = rows
    if "train" in loaded:
        held_out = [loaded[split] for split in SPLITS[1:] if split in loaded]
        with problems.collecting():
            loaded["train"] = _without_leaks(loaded["train"], held_out, args.drop_leaked_rows, notes)
            _check_labels(loaded["train"], held_out, args.label_column)
    problems.raise_any()
    labels = _ordered_labels(loaded["train"])
    return Splits(loaded["train"], loaded.get("validation"), loaded.get("test"), labels, notes)


def load_test_rows(path: str, args: TextArguments, labels: Sequence[str] | None) -> tuple[Rows, list[str]]:
    """Read, clean and check a file of rows for a model that exists, and notes for the user.

    Args:
        path: `--test_file`.
        args: how it is read.
        labels: of the model, or None where they are not known; then any will do.

    Raises:
        UserError: all problems of the file at once, labels that the model does not have among them.
    """
    notes: list[str] = []
    columns, optional = _columns(args)
    source = _Source(path, "--test_file", partial(read_batches, path, columns, optional))
    rows = _cleaned(source, args, notes)
    assert rows is not None  # only a dataset's own test rows may lack labels
    problems = [] if labels is None else _unseen_labels(rows, dict.fromkeys(labels, 0))
    if problems:
        raise UserError(problems)
    return rows, notes


def _columns(args: TextArguments) -> tuple[dict[str, str], dict[str, str]]:
    """Role to column name: of the columns that must be there, and of those that may be."""
    columns = {"text": args.text_column, "label": args.label_column}
    if args.language_column is not None:
        return columns | {"language": args.language_column}, {}
    return columns, {"language": "language"}


def _sources(args: DataArguments, problems: Problems) -> dict[str, _Source]:
    """The sources by split; those that cannot be found become problems."""
    columns, optional = _columns(args)
    sources: dict[str, _Source] = {}
    if args.dataset_name is not None:
        with problems.collecting():
            find = _builtin_sources if args.dataset_name.startswith(BUILTIN_PREFIX) else _hub_sources
            sources = find(args, columns, optional)
    for split in SPLITS:
        path = getattr(args, f"{split}_file")
        if path is not None:
            sources[split] = _Source(path, f"--{split}_file", partial(read_batches, path, columns, optional))
    return sources


def _builtin_sources(args: DataArguments, columns: dict[str, str], optional: dict[str, str]) -> dict[str, _Source]:
    origin = f"--dataset_name {args.dataset_name}"
    folder = BUILTIN_DATASETS.get(args.dataset_name or "")
    if folder is None:
        raise UserError(f"{origin}: there is no such built-in dataset; expected {' or '.join(BUILTIN_DATASETS)}.")
    files = resources.files("indictune.data") / folder
    paths = {split: str(files / f"{split}.jsonl") for split in SPLITS}
    return {
        split: _Source(path, origin, partial(read_batches, path, columns, optional)) for split, path in paths.items()
    }


def _hub_sources(args: DataArguments, columns: dict[str, str], optional: dict[str, str]) -> dict[str, _Source]:
    name, origin = str(args.dataset_name), f"--dataset_name {args.dataset_name}"
    found = load_hub_dataset(name, args.dataset_config_name)
    return {
        split: _Source(
            f"{name}/{split}", origin, partial(hub_batches, found[split], columns, optional), split == "test"
        )
        for split in SPLITS
        if split in found
    }


def _cleaned(source: _Source, args: TextArguments, notes: list[str]) -> Rows | None:
    """Read, clean and check the rows of one split; None where it may lack labels and does."""
    try:
        table = pa.Table.from_batches([_clean_batch(batch) for batch in source.read()])
    except UserError as error:
        raise UserError([f"{source.origin} {problem}" for problem in error.problems]) from error
    full = pc.not_equal(table["text"], "")
    empty = table.filter(pc.invert(full))
    if empty.num_rows:
        table = table.filter(full)
    if table.num_rows == 0:
        raise UserError(
            f"{source.origin} {source.name}: all {empty.num_rows} rows are empty in column {args.text_column} "
            "(--text_column)."
        )
    if empty.num_rows:
        ids = _places(source.name, empty)
        notes.append(f"{source.origin} {source.name}: {empty.num_rows} rows without text were dropped: {ids}.")
        logger.debug("%s: rows without text, by line: %s", source.name, empty["line"].to_pylist())
    unlabelled = table.filter(pc.is_null(table["label"]))
    if source.may_lack_labels and unlabelled.num_rows == table.num_rows:
        notes.append(f"{source.origin}: its test rows have no labels and are left out.")
        return None
    if unlabelled.num_rows:
        raise UserError(
            f"{source.origin} {source.name}: {unlabelled.num_rows} rows have no label in column {args.label_column} "
            f"(--label_column): {_places(source.name, unlabelled)}."
        )
    return Rows(table, source.name, source.origin)


def _clean_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with cleaned texts, labels in one spelling and a language in every row."""
    texts = [clean(text or "") for text in batch["text"].to_pylist()]
    labels = batch["label"].to_pylist()
    spellings = {label: normalise_label(label) for label in set(labels)}
    languages = [
        (language or "").strip() or language_of(text)
        for language, text in zip(batch["language"].to_pylist(), texts, strict=True)
    ]
    columns = (texts, [spellings[label] for label in labels], languages)
    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch([*arrays, batch["line"]], names=["text", "label", "language", "line"])


def _places(source: str, table: pa.Table) -> str:
    lines = table["line"][:_MAX_IDS].to_pylist()
    more = f" and {table.num_rows - _MAX_IDS} more" if table.num_rows > _MAX_IDS else ""
    return ", ".join(place(source, line) for line in lines) + more


def _without_leaks(train: Rows, held_out: list[Rows], drop: bool, notes: list[str]) -> Rows:
    """The training rows, without those whose text also stands in held-out rows where `drop` says so.

    Raises:
        UserError: no row would be left.
    """
    table = train.table
    for rows in held_out:
        leaked = pc.is_in(table["text"], value_set=rows.table["text"])
        count = pc.sum(leaked).as_py() or 0
        if not count:
            continue
        also = f"{train.source}: {count} of {table.num_rows} training rows also stand in {rows.source}"
        if drop:
            table = table.filter(pc.invert(leaked))
            notes.append(f"{also}; they were removed from training (--drop_leaked_rows).")
        else:
            notes.append(f"{also}, whose scores will look too good; --drop_leaked_rows removes them from training.")
    if table.num_rows == 0:
        raise UserError(
            f"--drop_leaked_rows removes all {len(train)} rows of {train.origin} {train.source}: each of them also "
            "stands in the validation or test rows. Give other rows for one of them."
        )
    return Rows(table, train.source, train.origin)


def _check_labels(train: Rows, held_out: list[Rows], label_column: str) -> None:
    counts = _label_counts(train)
    where = f"{train.origin} {train.source}: column {label_column} (--label_column)"
    if _looks_like_free_text(counts):
        examples = ", ".join(f'"{shortened(label)}"' for label in list(counts)[:3])
        raise UserError(
            f"{where} looks like free text, not like labels: {len(counts)} different values in {len(train)} rows, "
            f"such as {examples}. Name the column with the classes by --label_column."
        )
    problems = Problems()
    if len(counts) < 2:
        problems.append(f"{where} holds only the label {next(iter(counts))}; a classifier needs at least two labels.")
    for rows in held_out:
        problems.extend(_unseen_labels(rows, counts))
    problems.raise_any()


def _unseen_labels(rows: Rows, known: dict[str, int]) -> list[str]:
    unseen = {label: count for label, count in _label_counts(rows).items() if label not in known}
    problems = []
    for label, count in list(unseen.items())[:_MAX_LISTED]:
        first = rows.place(pc.index(rows.table["label"], label).as_py())
        problems.append(
            f"{rows.origin} {rows.source}: label {shortened(label)} ({count} rows, the first at {first}) does not "
            f"occur in the training rows; their labels are {', '.join(map(shortened, sorted(known)[:_MAX_IDS]))}."
        )
    if len(unseen) > _MAX_LISTED:
        problems.append(
            f"{rows.origin} {rows.source}: {len(unseen) - _MAX_LISTED} more labels that training rows lack."
        )
    return problems


def _label_counts(rows: Rows) -> dict[str, int]:
    return {item["values"]: item["counts"] for item in pc.value_counts(rows.table["label"]).to_pylist()}


def _looks_like_free_text(counts: dict[str, int]) -> bool:
    """Too many values for labels, or nearly a value a row: over 20 of them, or a handful of wordy ones."""
    if len(counts) > _MAX_LABELS:
        return True
    if 2 * len(counts) <= sum(counts.values()):
        return False
    wordy = sum(len(label.split()) >= 3 for label in counts)
    return len(counts) > 20 or (len(counts) >= 5 and 2 * wordy > len(counts))


def _ordered_labels(rows: Rows) -> list[str]:
    labels = sorted(_label_counts(rows))
    return sorted(labels, key=float) if all(map(_NUMBER.fullmatch, labels)) else labels
