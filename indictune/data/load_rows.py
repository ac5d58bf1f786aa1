"""Load labelled texts and raw ones: read, clean and check them before anything expensive starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import DataArguments
from indictune.config.shared_arguments import EvaluationArguments, RawTextForm, TextArguments
from indictune.data.bad_rows import BadRows, Batches, bad_rows
from indictune.data.cache import READ, StoredRows, leaked_rows, map_table, repeated_batches, write_on, write_table
from indictune.data.columns import BETWEEN_TEXTS, Wanted, document_columns, wanted_columns
from indictune.data.health.encodings import DamagedTexts
from indictune.data.health.findings import Finding, Found, rare_labels, same_texts
from indictune.data.label_names import LabelNames, likely_label_map
from indictune.data.labels import checked_labels, unknown_labels
from indictune.data.read.row_sources import Source, file_source, refuse_early, text_reader, text_sources
from indictune.data.row_choice import Mixture, Splits, ValidationSplit, stored_splits
from indictune.data.text.cleaning import SCHEMA, as_written, cleaned, usable_cores
from indictune.errors import Problem, Problems, UserError, attributed_to

_MAX_LOCATIONS = 10

TextSource = Source[pa.RecordBatch]


def load_splits(
    args: DataArguments,
    found: Problems | None = None,
    sources: Mapping[str, TextSource] | None = None,
    validation_split: ValidationSplit | None = None,
    mixture: Mixture | None = None,
    known: Sequence[str] = (),
) -> Splits[StoredRows]:
    """Read, clean and check all rows of a run, or take them from the cache.

    If problems were `found` so far, only the first rows of long files are read. Raises `UserError` with all problems
    of all files and labels at once, and those of `found`. `validation_split` and `mixture` as of `stored_splits`. If
    `known` labels are given, rows may have these alone, and need not have all: a teacher gave them.
    """
    problems = Problems(found or ())
    given = text_sources(args, problems) if sources is None else sources
    names = LabelNames(args.problem_type, args.label_map, args.keep_label_spellings, known or None)
    splits = _load(given, args, problems, names, validation_split, mixture)
    problems.extend(each for rows in splits.rows.values() for each in (unknown_labels(rows, known) if known else ()))
    problems.raise_any()  # those of rows from the cache
    return replace(splits, labels=list(known)) if known else splits


def load_test_rows(
    named: str | Sequence[str],
    args: EvaluationArguments,
    labels: Sequence[str] | None,
    found: Sequence[Problem] = (),
    problem_type: str | None = None,
) -> Splits[StoredRows]:
    """Read, clean and check the files of rows for a finished model, or take them from the cache: the split `test`.

    `labels` are those of the model, whose names the rows get; None accepts any. Raises as `load_splits`, and for
    labels that the model lacks.
    """
    source = file_source(named, "--test_file", text_reader(args, problem_type))
    names = LabelNames(problem_type, args.label_map, args.keep_label_spellings, labels or ())
    splits = _load({"test": source}, args, Problems(found), names)
    Problems([] if labels is None else unknown_labels(splits.rows["test"], labels, problem_type)).raise_any()
    return splits


def load_documents(
    sources: Mapping[str, TextSource],
    args: RawTextForm,
    found: Sequence[Problem],
    cleans: bool,
    validation_split: ValidationSplit | None = None,
    mixture: Mixture | None = None,
) -> Splits[StoredRows]:
    """Read and check raw texts, or take them from the cache; arguments and errors are as of `load_splits`.

    With `cleans`, texts are cleaned as labelled ones are; else they stay as they are written.
    """
    return _load(sources, args, Problems(found), None, validation_split, mixture, cleans)


def _load(
    sources: Mapping[str, TextSource],
    args: DataArguments | EvaluationArguments | RawTextForm,
    problems: Problems,
    names: LabelNames | None,
    validation_split: ValidationSplit | None = None,
    mixture: Mixture | None = None,
    cleans: bool = True,
) -> Splits[StoredRows]:
    """The rows of all splits; without `names` they have no labels."""
    problem_type = None if names is None else names.problem_type
    columns = document_columns(cast(RawTextForm, args)) if names is None else wanted_columns(cast(TextArguments, args))
    drops_leaks = isinstance(args, DataArguments) and args.drop_leaked_rows

    def read(folder: Path, found: Found) -> dict[str, StoredRows]:
        refuse_early(problems, sources.values(), 1)
        rows: dict[str, StoredRows] = {}
        for split, source in sources.items():
            with problems.collecting(), attributed_to(source.origin):
                bad = bad_rows(source.name, args, folder)
                workers = usable_cores(args.num_proc) if cleans else None
                of_split = _read_split(source, columns, found, folder / f"{split}.arrow", bad, workers)
                rows |= {} if of_split is None else {split: of_split}
        if names is not None and rows and next(iter(sources)) in rows:
            with problems.collecting():
                rows = names.apply(rows, folder, found.notes)
        if "train" in rows:
            with problems.collecting():
                held_out = [rows[split] for split in rows if split != "train"]
                rows["train"] = _without_leaks(rows["train"], held_out, drops_leaks, found, folder / "train.arrow")
                if names is not None and names.known is None:
                    found.labels = checked_labels(rows["train"], held_out, columns.labels, problem_type)
        problems.raise_any()
        if "train" in rows and names is not None:
            found.notes += [*rare_labels(rows["train"], problem_type), *likely_label_map(rows["train"], problem_type)]
        if "train" in rows:
            found.findings += same_texts(rows, problem_type)
        for path in folder.glob(f"*{READ}"):
            path.unlink()
        return rows

    settings = [asdict(columns), drops_leaks, args.bad_rows, args.max_bad_fraction, names and asdict(names), cleans]
    settings.append(args.txt_documents if isinstance(args, RawTextForm) else None)
    return stored_splits("rows", StoredRows, sources, settings, read, validation_split, mixture, problem_type)


def _read_split(
    source: TextSource, columns: Wanted, found: Found, path: Path, bad: BadRows, cleans: int | None
) -> StoredRows | None:
    """Read, clean and check the rows of one split into a table; None for a split that may lack labels and does.

    So many processes clean them; with None, they stay as they are written.
    """
    damaged = DamagedTexts()
    schema = SCHEMA if columns.labels else SCHEMA.remove(SCHEMA.get_field_index("label"))

    def batches_from(done: int) -> Batches:
        read = damaged.watching(source.read(bad))
        rest = islice(read, done, None)
        made = map(as_written, rest) if cleans is None else cleaned(rest, cleans)
        return (batch.select(schema.names) for batch in made)

    all_rows = path.with_suffix(READ)
    write_on(all_rows, schema, batches_from, f"reading {source.name}")
    table = map_table(all_rows)
    full = pc.invert(pc.is_in(table["text"], pa.array(["", BETWEEN_TEXTS])))
    lines = table["line"].filter(pc.invert(full))
    labelled = pc.and_(full, table["label"].is_valid()) if columns.labels else full
    count = pc.sum(labelled).as_py() or 0
    lacks_labels = source.may_lack_labels and not count
    for batch in table.filter(pc.and_not(full, labelled)).to_batches() if columns.labels and not lacks_labels else ():
        for row in batch.to_pylist():
            row |= zip(("text", "text_pair"), row["text"].split(BETWEEN_TEXTS), strict=False)
            bad.add(row.pop("line"), "no-label", row, column=columns.labels)
    whole = len(table) - len(lines) if lacks_labels else count
    bad.finish(whole)
    found.notes += [f"{source.origin} {note}" for note in bad.notes()]
    found.findings += damaged.findings(source.origin, bad, whole)
    if len(table) == len(lines):
        column = " or ".join(columns.roles[role] for role in ("text", "text_pair") if role in columns.roles)
        raise UserError("no-texts", value=source.name, rows=len(lines), column=column)
    if len(lines):
        locations = ", ".join(map(bad.location, lines[:_MAX_LOCATIONS].to_pylist()))
        locations += f" and {len(lines) - _MAX_LOCATIONS:,} more" if len(lines) > _MAX_LOCATIONS else ""
        found.notes.append(f"{source.origin} {source.name}: {len(lines)} rows without text were dropped: {locations}.")
    if lacks_labels:
        found.notes.append(f"{source.origin}: its test rows have no labels and are left out.")
        return None
    path.unlink(missing_ok=True)
    if count == len(table):
        with suppress(OSError):  # the file system has no hard links
            os.link(all_rows, path)
    if not path.exists():
        write_table(path, schema, repeated_batches(all_rows, labelled.to_numpy()))
    return StoredRows(map_table(path), source.name, source.origin, bad.files)


def _without_leaks(train: StoredRows, held_out: list[StoredRows], drop: bool, found: Found, path: Path) -> StoredRows:
    """The training rows; with `drop`, without those whose text also stands in held-out rows."""
    if not held_out:
        return train
    leaked = leaked_rows(path, pa.concat_tables([rows.table for rows in held_out]), itemgetter("text"))
    if not (count := int(leaked.sum())):
        return train
    also = f"{count} of {len(train)} training rows also stand in {' or '.join(rows.source for rows in held_out)}"
    if not drop:
        also += ", whose scores will look too good; --drop_leaked_rows removes them from training."
        found.findings.append(Finding("leaked_rows", count, len(train), f"{train.source}: {also}"))
        return train
    if count == len(train):
        details: dict[str, Any] = {"rows": count, "origin": train.origin, "source": train.source}
        raise UserError("all-rows-leaked", "--drop_leaked_rows", "true", **details)
    write_table(path, train.table.schema, repeated_batches(path, ~leaked))
    found.notes.append(f"{train.source}: {also}; they were removed from training (--drop_leaked_rows).")
    return replace(train, table=map_table(path))
