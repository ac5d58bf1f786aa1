"""The rows of a run: read, cleaned, given a language, and checked before anything expensive starts."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, tee
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import DataArguments, TextArguments
from indictune.config.command_arguments import EvaluateArguments
from indictune.data.arrow_tables import map_table, stored_batches, write_table
from indictune.data.bad_rows import BadRows, Quarantine, bad_rows, place
from indictune.data.cache import made_once
from indictune.data.clean_batches import SCHEMA, cleaned
from indictune.data.columns import normalise_label, shortened
from indictune.data.label_spellings import Spellings
from indictune.data.lost_letters import LostLetters
from indictune.data.progress_bar import shown
from indictune.data.row_sources import SPLITS, Source, columns_of, file_source, refuse_early, sources_of
from indictune.errors import Problems, UserError

logger = logging.getLogger(__name__)

_MAX_IDS = 20
_MAX_LABELS = 1000
_MAX_LISTED = 5
_FACTS = "facts.json"
# Compared with the held-out rows at a time, whose texts are gathered anew each time.
_LEAK_BATCHES = 10
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Attributes:
        table: columns `text` (cleaned, never empty), `label`, `language` (strings without nulls), `line` (int64: line
            of the file, or number of the row in a parquet file or dataset, from 1).
        source: the file or dataset they come from, as messages name it.
        origin: the flag and value that named it.
        files: of the dataset, where its rows are lines of files; `line` tells which of them, by `LINES_OF_A_FILE`.
    """

    table: pa.Table
    source: str
    origin: str
    files: Sequence[str] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def place(self, index: int) -> str:
        """Where row `index` (from 0) stands in its source: `file:line`."""
        return place(self.source, self.table["line"][index].as_py(), self.files)

    def each_label(self) -> Iterator[str]:
        """The label of every row, one after the other."""
        for labels in self.table["label"].iterchunks():
            yield from labels.to_pylist()

    def languages(self) -> list[str]:
        """Those of the rows, each once, in alphabetical order."""
        return sorted(self.table["language"].unique().to_pylist())


@dataclass(frozen=True)
class Splits:
    """All rows of a run.

    Attributes:
        train: rows to train on.
        validation: rows for the evaluations of a run, or None.
        test: rows to evaluate once at the end, or None.
        labels: labels of the training rows, in numerical order if all are numbers, else in alphabetical order. A
            label's position is its class id.
        folder: holds the tables as `<split>.arrow`; its name changes with anything that the rows are made from.
        notes: sentences to tell the user: empty rows that were dropped, rows in more than one split.
    """

    train: Rows
    validation: Rows | None
    test: Rows | None
    labels: list[str]
    folder: Path
    notes: list[str] = field(default_factory=list)


def load_splits(
    args: DataArguments, found: Problems | None = None, sources: Mapping[str, Source] | None = None
) -> Splits:
    """Read, clean and check all rows of a run, or take them from the cache.

    Args:
        args: how they are read.
        found: problems of the run so far, which refuse it: of long files only the first rows are then read.
        sources: from `sources_of`, where it was asked before.

    Raises:
        UserError: all problems of all files and labels at once, and those of `found`.
    """
    problems = Problems(found or ())
    sources = sources_of(args, problems) if sources is None else sources
    made_from = [[split, src.name, src.origin, src.fingerprint] for split, src in sources.items()]
    parts = [made_from, columns_of(args), args.drop_leaked_rows, args.bad_rows, args.max_bad_fraction]
    folder = made_once("rows", parts, "The rows", lambda folder: _prepare(folder, sources, args, problems))
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    loaded = {
        split: Rows(map_table(folder / f"{split}.arrow"), *described) for split, described in facts["splits"].items()
    }
    return Splits(
        *(loaded["train"], loaded.get("validation"), loaded.get("test")), facts["labels"], folder, facts["notes"]
    )


def _prepare(folder: Path, sources: Mapping[str, Source], args: DataArguments, problems: Problems) -> None:
    """Write the rows of all splits, and what there is to know of them.

    Args:
        folder: gets `<split>.arrow` and `facts.json`.
        sources: by split.
        args: how they are read.
        problems: found so far.

    Raises:
        UserError: all problems of all files and labels at once.
    """
    heads = ((source.origin, source.read(bad_rows(source.name, args, folder))) for source in sources.values())
    refuse_early(problems, heads, 1)
    notes: list[str] = []
    loaded: dict[str, Rows] = {}
    spellings = Spellings()
    for split, source in sources.items():
        with problems.collecting():
            bad = bad_rows(source.name, args, folder)
            rows = _cleaned(source, args, notes, folder / f"{split}.arrow", bad, spellings)
            if rows is not None:
                loaded[split] = rows
    notes += spellings.notes()
    if "train" in loaded:
        held_out = [loaded[split] for split in SPLITS[1:] if split in loaded]
        with problems.collecting():
            loaded["train"] = _without_leaks(
                loaded["train"], held_out, args.drop_leaked_rows, notes, folder / "train.arrow"
            )
            _check_labels(loaded["train"], held_out, args.label_column)
    problems.raise_any()
    facts = {
        "splits": {split: (rows.source, rows.origin, rows.files) for split, rows in loaded.items()},
        "labels": _ordered_labels(loaded["train"]),
        "notes": notes,
    }
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def load_test_rows(
    path: str, args: EvaluateArguments, labels: Sequence[str] | None, found: Sequence[str] = ()
) -> tuple[Rows, Path, list[str]]:
    """Read, clean and check a file of rows for a model that exists, or take them from the cache.

    Args:
        path: `--test_file`.
        args: how it is read, and what becomes of its bad rows.
        labels: of the model, or None where they are not known; then any will do.
        found: problems of the command so far, which refuse it: of a long file only the first rows are then read.

    Returns:
        The rows, the folder that holds them as `test.arrow` beside those that were left out, and notes for the user.

    Raises:
        UserError: all problems of the file at once, labels that the model does not have among them; or `found`.
    """
    source = file_source(path, "--test_file", args)

    def make(folder: Path) -> None:
        refuse_early(Problems(found), [(source.origin, source.read(bad_rows(path, args, folder)))], 1)
        notes: list[str] = []
        spellings = Spellings()
        _cleaned(source, args, notes, folder / "test.arrow", bad_rows(path, args, folder), spellings)
        notes += spellings.notes()
        (folder / _FACTS).write_text(json.dumps({"notes": notes}), encoding="utf-8")

    parts = [source.name, source.origin, source.fingerprint, columns_of(args), args.bad_rows, args.max_bad_fraction]
    folder = made_once("test", parts, "The rows", make)
    rows = Rows(map_table(folder / "test.arrow"), source.name, source.origin)
    problems = [] if labels is None else _unseen_labels(rows, dict.fromkeys(labels, 0))
    if problems:
        raise UserError(problems)
    notes: list[str] = json.loads((folder / _FACTS).read_text(encoding="utf-8"))["notes"]
    return rows, folder, notes


def _cleaned(
    source: Source, args: TextArguments, notes: list[str], path: Path, bad: BadRows, spellings: Spellings
) -> Rows | None:
    """Read, clean and check the rows of one split; None where it may lack labels and does.

    Args:
        source: of the rows.
        args: how they are read.
        notes: get what the user should know.
        path: gets the table.
        bad: gets the rows that cannot be used; rows without text are no bad rows unless these are left out.
        spellings: get those of the labels.
    """
    empty: list[pa.Array] = []
    left_out = isinstance(bad, Quarantine)
    lost = LostLetters()
    try:
        read = lost.read(spellings.read(source.read(bad), bad.place), bad.place)
        batches = _usable(source, read, bad, args, path.parent) if left_out else _with_text(cleaned(read), empty)
        write_table(path, SCHEMA, shown(batches, f"reading {source.name}"))
        table = map_table(path)
        bad.finish(table.num_rows)
    except UserError as error:
        raise UserError([f"{source.origin} {problem}" for problem in error.problems]) from error
    notes += [f"{source.origin} {note}" for note in bad.notes()]
    notes += [f"{source.origin} {source.name}: {note}" for note in lost.notes()]
    empty_lines = pa.chunked_array(empty, pa.int64())
    if table.num_rows == 0:
        raise UserError(
            f"{source.origin} {source.name}: all {len(empty_lines)} rows are empty in column {args.text_column} "
            "(--text_column)."
        )
    if len(empty_lines):
        places = _places(bad, empty_lines)
        notes.append(f"{source.origin} {source.name}: {len(empty_lines)} rows without text were dropped: {places}.")
        if logger.isEnabledFor(logging.DEBUG):  # there may be millions
            logger.debug("rows without text: %s", [bad.place(line) for line in empty_lines.to_pylist()])
    unlabelled = table["line"].filter(pc.is_null(table["label"]))
    if source.may_lack_labels and len(unlabelled) == table.num_rows:
        notes.append(f"{source.origin}: its test rows have no labels and are left out.")
        path.unlink()
        return None
    if len(unlabelled):
        raise UserError(
            f"{source.origin} {source.name}: {len(unlabelled)} rows have no label in column {args.label_column} "
            f"(--label_column): {_places(bad, unlabelled)}."
        )
    return Rows(table, source.name, source.origin, bad.files)


def _with_text(batches: Iterator[pa.RecordBatch], empty: list[pa.Array]) -> Iterator[pa.RecordBatch]:
    """The cleaned rows that have a text; `empty` gets the lines of the others."""
    for batch in batches:
        full = pc.not_equal(batch["text"], "")
        empty.append(batch["line"].filter(pc.invert(full)))
        yield batch.filter(full)


def _has_labels(source: Source, folder: Path) -> bool:
    """Whether any row has a label. What cannot be read is told when the rows are read again."""
    batches = source.read(Quarantine(source.name, 0.0, folder))
    return any(normalise_label(label) for batch in batches for label in batch["label"].to_pylist())


def _usable(
    source: Source, given: Iterator[pa.RecordBatch], bad: BadRows, args: TextArguments, folder: Path
) -> Iterator[pa.RecordBatch]:
    """The rows given, cleaned, that have a text and a label; `bad` gets the others as they were read."""
    may_lack_label = source.may_lack_labels and not _has_labels(source, folder)
    to_clean, as_read = tee(given)
    for batch, read in zip(cleaned(to_clean), as_read, strict=True):
        full = pc.not_equal(batch["text"], "")
        good = full if may_lack_label else pc.and_(full, pc.is_valid(batch["label"]))
        for row, has_text in zip(read.filter(pc.invert(good)).to_pylist(), full.filter(pc.invert(good)), strict=True):
            column, kind = (args.label_column, "no label") if has_text.as_py() else (args.text_column, "no text")
            bad.add(row.pop("line"), f"{kind} in column {column}.", row, kind)
        yield batch.filter(good)


def _places(bad: BadRows, lines: pa.ChunkedArray) -> str:
    more = f" and {len(lines) - _MAX_IDS} more" if len(lines) > _MAX_IDS else ""
    return ", ".join(bad.place(line) for line in lines[:_MAX_IDS].to_pylist()) + more


def _without_leaks(train: Rows, held_out: list[Rows], drop: bool, notes: list[str], path: Path) -> Rows:
    """The training rows, without those whose text also stands in held-out rows where `drop` says so.

    Args:
        train: rows.
        held_out: validation and test rows.
        drop: `--drop_leaked_rows`.
        notes: get what was found.
        path: of the training rows' table, which is written anew where rows are dropped.

    Raises:
        UserError: no row would be left.
    """
    left = len(train)
    for rows in held_out:
        leaked = _leaked(path, rows)
        count = sum(pc.sum(mask).as_py() or 0 for mask in leaked)
        if not count:
            continue
        also = f"{train.source}: {count} of {left} training rows also stand in {rows.source}"
        if drop:
            left -= count
            _rewrite(path, leaked)
            notes.append(f"{also}; they were removed from training (--drop_leaked_rows).")
        else:
            notes.append(f"{also}, whose scores will look too good; --drop_leaked_rows removes them from training.")
    if left == 0:
        raise UserError(
            f"--drop_leaked_rows removes all {len(train)} rows of {train.origin} {train.source}: each of them also "
            "stands in the validation or test rows. Give other rows for one of them."
        )
    return replace(train, table=map_table(path))


def _leaked(path: Path, held_out: Rows) -> list[pa.BooleanArray]:
    """Which rows of a table have a text that also stands in `held_out`, a record batch an array."""
    leaked: list[pa.BooleanArray] = []
    batches = stored_batches(path)
    while some := list(islice(batches, _LEAK_BATCHES)):
        masks = pc.is_in(pa.Table.from_batches(some)["text"], value_set=held_out.table["text"])
        mask = masks.combine_chunks()  # which arrow may cut elsewhere than the texts, or not at all
        starts = accumulate((batch.num_rows for batch in some), initial=0)
        leaked += [mask.slice(start, batch.num_rows) for start, batch in zip(starts, some, strict=False)]
    return leaked


def _rewrite(path: Path, leaked: list[pa.BooleanArray]) -> None:
    """Write a table again without some rows."""
    kept = (batch.filter(pc.invert(mask)) for batch, mask in zip(stored_batches(path), leaked, strict=True))
    unfinished = path.with_suffix(".unfinished")
    write_table(unfinished, SCHEMA, kept)
    unfinished.rename(path)


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
