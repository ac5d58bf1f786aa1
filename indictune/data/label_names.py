"""Give the labels of a run their names: split those of a row, and join spellings, as `--label_map` says too."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.cache import MAX_LISTED_ROWS, StoredRows, map_table, stored_batches, with_column, write_table
from indictune.data.columns import SEPARATOR, label_key, names_by_key, normalise_label, shortened
from indictune.data.health.findings import NO_CLASS
from indictune.data.labels import MULTI_LABEL, REGRESSION, AnyRows, items_of_labels, label_counts, mark_between
from indictune.errors import Problems, UserError, problem

_FLAG = "--label_map"
_ABBREVIATION = 4  # letters at most
_MAX_LISTED = 10

Names = Mapping[str, str | None]  # label as written -> its name, None if its rows are left out


@dataclass(frozen=True)
class LabelNames:
    """How labels as written become the labels of a run.

    Attributes:
        problem_type: of the run or the model; None for one label a row.
        label_map: the words of the flag, such as `pos=positive`.
        keep_spellings: whether labels that differ in case or separators stay apart.
        known: the labels of a finished model. None: the most frequent spelling in the training rows is the name.
    """

    problem_type: str | None
    label_map: Sequence[str]
    keep_spellings: bool
    known: Sequence[str] | None = None

    def apply(self, rows: Mapping[str, AnyRows], folder: Path, notes: list[str]) -> dict[str, AnyRows]:
        """The rows by split with their labels by name, several of a row as `a|b`; their tables are in `folder`.

        `notes` get what was split, joined or left out. The first split is the training rows, or those of an
        evaluation. Raises `UserError` if `--label_map` names a label that no row has, or leaves no row of a split.
        """
        if self.problem_type == REGRESSION and not self.label_map:
            return dict(rows)
        counts = [label_counts(each) for each in rows.values()]
        every, known, found = sum(map(Counter, counts), Counter[str]()), self.known or (), list[str]()
        several = self.problem_type == MULTI_LABEL
        is_open = self.problem_type is None and self.known is None
        mark = mark_between(every, several, known) if several or is_open else None
        items = items_of_labels(every, mark, known)
        if mark is not None:
            example = shortened(next(label for label in every if items[label][1:]))
            ways = f"one class each; --problem_type {MULTI_LABEL} splits them", f"split at each {mark!r}"
            found.append(f"labels such as {example!r} are {ways[several]}.")
        items = items if several else {label: [label] for label in every}
        of_first, of_all = _of_items(counts[0], items), _of_items(every, items)
        names, first = self._names(of_first, of_all), next(iter(rows.values()))
        notes += [f"{first.origin} {first.source}: {note}" for note in (*found, *_notes(names, of_all))]
        renamed = {label: _joined([names[each] for each in of_label]) for label, of_label in items.items()}
        if all(label == new for label, new in renamed.items()):
            return dict(rows)
        return {split: _renamed(each, folder / f"{split}.arrow", renamed) for split, each in rows.items()}

    def _names(self, first: Mapping[str, int], every: Mapping[str, int]) -> Names:
        """The names, from the rows of each label in the first split and in all."""
        keeps = self.keep_spellings or self.problem_type == REGRESSION
        key = str if keeps else label_key
        words = (word.partition("=") for word in self.label_map)
        pairs = [(normalise_label(old) or "", normalise_label(new)) for old, _, new in words]
        exact, asked = dict(pairs), {key(old): new for old, new in pairs}
        named = {label: exact.get(label, asked.get(key(label), label)) for label in every}
        if self.known is None:
            present, labels = {*map(key, every)}, ", ".join(map(shortened, sorted(every)[:MAX_LISTED_ROWS]))
            unused = [word for word, (old, _) in zip(self.label_map, pairs, strict=True) if key(old) not in present]
            Problems(problem("label-map-unused", _FLAG, word, labels=labels) for word in unused).raise_any()
        if keeps:
            return named
        if self.known is not None:
            by_key = names_by_key(self.known)
        else:
            given, rows, by_key = {new for _, new in pairs}, Counter[str](), dict[str, str]()
            for label, name in named.items():
                rows[name or ""] += first.get(label, 0)
            for name in sorted(filter(None, rows), key=lambda name: (name not in given, -rows[name], name)):
                by_key.setdefault(label_key(name), name)
        return {label: by_key.get(label_key(name), name) if name else None for label, name in named.items()}


def _of_items(counts: Mapping[str, int], items: Mapping[str, Sequence[str]]) -> Counter[str]:
    """Rows of each single label, from those of labels as written."""
    found = Counter[str]()
    for label, count in counts.items():
        found.update(dict.fromkeys(items[label], count))
    return found


def _joined(names: Sequence[str | None]) -> str | None:
    return None if None in names else SEPARATOR.join(dict.fromkeys(filter(None, names))) or SEPARATOR


def _notes(names: Names, counts: Mapping[str, int]) -> list[str]:
    """Which rows are left out, and which labels join others by `--label_map`, or other spellings of their names."""
    groups: dict[tuple[int, str | None], list[str]] = {}
    for label, name in names.items():
        order = 0 if name is None else 1 + (label_key(label) == label_key(name))
        groups.setdefault((order, name), []).append(label)
    changed = sorted((each for each in groups.items() if each[1] != [each[0][1]]), key=lambda each: each[0][0])
    notes = []
    for (order, name), labels in changed[:_MAX_LISTED]:
        what = "rows are left out of" if name is None else f"label {shortened(name)} joins"
        how = "; --keep_label_spellings true keeps them apart" if order == 2 else f" ({_FLAG})"
        notes.append(f"{what} {', '.join(f'{_coded(each)} ({counts[each]:,} rows)' for each in labels)}{how}.")
    return notes + [f"{len(changed) - _MAX_LISTED} more labels join others."] * (len(changed) > _MAX_LISTED)


def _coded(label: str) -> str:
    """A label, with the code points of characters that nobody sees or that look like others."""
    odd = [each for each in label if unicodedata.category(each) == "Cf" or unicodedata.normalize("NFKC", each) != each]
    return shortened(label) + "".join(f" U+{ord(each):04X}" for each in odd)


def _renamed(rows: AnyRows, path: Path, names: Names) -> AnyRows:
    """The rows of the table at `path`, written again with their labels by name, without those that have none."""
    columns = ((batch, [names[label] for label in batch["label"].to_pylist()]) for batch in stored_batches(path))
    batches = (with_column(batch, "label", pa.array(labels, pa.string())) for batch, labels in columns)
    write_table(path, rows.table.schema, (batch.filter(pc.is_valid(batch["label"])) for batch in batches))
    if not len(table := map_table(path)):
        raise UserError("no-rows", _FLAG, rows.source, "Leave out fewer labels.")
    return replace(rows, table=table)


def likely_label_map(train: StoredRows, problem_type: str | None) -> list[str]:
    """A sentence with `--label_map` for labels that look like others in short, such as `pos`, if there are any."""
    labels = [] if problem_type == REGRESSION else sorted(label_counts(train, problem_type))
    word = {label: re.split(r"[\s_\-,;/]", label.casefold())[0] for label in labels}
    begun = {each for each in word.values() for other in word.values() if each != other and other.startswith(each)}
    whole = [label for label in labels if word[label] not in begun and SEPARATOR not in label]
    short = [each for each in labels if each.casefold() in begun and each.isalpha() and len(each) <= _ABBREVIATION]
    found = []
    for label in short:
        meant = [each for each in whole if word[each].startswith(label.casefold())]
        found += [f"{label}={meant[0]}"] if len(meant) == 1 else []
    words = shlex.join([*found, *(f"{label}=" for label in labels if NO_CLASS.match(label))])
    where, note = f"{train.origin} {train.source}", "some labels look like others in short. If they mean the same, use"
    return [f"{where}: {note} {_FLAG} {words}"] if found else []
