"""Write lists of labels as `a|b`: `['joy', 'anger']`, and `[0, 1, 1]`, whose ones stand for the labels 1 and 2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from indictune.data.arrow_tables import map_table, stored_batches, write_table
from indictune.data.columns import SEPARATOR
from indictune.data.rows import StoredRows
from indictune.data.targets import parts

AnyRows = TypeVar("AnyRows", bound=StoredRows)

_NUMBERS = re.compile(r"[\d\s]+")  # as numpy prints a list of them


def look_like_lists(labels: Collection[str]) -> bool:
    """Whether labels of one class a row look like lists: all in brackets, or `a|b` and `a` or `a|c`."""
    if labels and all(map(_is_bracketed, labels)):
        return True
    labels_of = Counter(part for label in labels for part in {*parts(label)})
    return any(SEPARATOR in label and any(labels_of[part] > 1 for part in parts(label)) for label in labels)


def spell_out(rows: Mapping[str, AnyRows], folder: Path) -> dict[str, AnyRows]:
    """Rows by split with their labels as `a|b`; their tables are in `folder`."""
    written = {label for each in rows.values() for label in each.table["label"].unique().to_pylist()}
    spelled = _spelled(written)
    if all(label == new for label, new in spelled.items()):
        return dict(rows)
    return {split: _spelled_rows(each, folder / f"{split}.arrow", spelled) for split, each in rows.items()}


def _spelled(labels: Collection[str]) -> dict[str, str]:
    """Label as written -> as `a|b`.

    Lists of 0 and 1 that have one length, all of them, say of each label whether the row has it.
    """
    items = {label: _items(label) for label in labels}
    if len({*map(len, items.values())}) == 1 and all(
        of_row[1:] and {*of_row} <= {"0", "1"} for of_row in items.values()
    ):
        items = {label: [str(place) for place, each in enumerate(row) if each == "1"] for label, row in items.items()}
    return {label: SEPARATOR.join(of_row) or SEPARATOR for label, of_row in items.items()}


def _items(label: str) -> list[str]:
    if not _is_bracketed(label):
        return parts(label)
    inside = label[1:-1]
    between = r"\s+" if _NUMBERS.fullmatch(inside) else ","
    return [item for each in re.split(between, inside) if (item := each.strip().strip("'\"").strip())]


def _is_bracketed(label: str) -> bool:
    return label.startswith("[") and label.endswith("]")


def _spelled_rows(rows: AnyRows, path: Path, spelled: Mapping[str, str]) -> AnyRows:
    unfinished = path.with_suffix(".unfinished")
    index = rows.table.schema.get_field_index("label")
    batches = (
        batch.set_column(
            index, "label", pa.array([spelled[label] for label in batch["label"].to_pylist()], pa.string())
        )
        for batch in stored_batches(path)
    )
    write_table(unfinished, rows.table.schema, batches)
    unfinished.rename(path)
    return replace(rows, table=map_table(path))
