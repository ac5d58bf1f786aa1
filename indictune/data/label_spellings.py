"""Report labels of several spellings that become one label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unicodedata import normalize

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import normalise_label, plain_label, shortened

_MAX_KEPT = 2_000  # twice the number of labels that a classifier may have
_MAX_LISTED = 5


class Spellings:
    """Collect the spellings of labels in all splits of a run, with their first locations."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}

    def read(self, batches: Iterator[pa.RecordBatch], location: Callable[[int], str]) -> Iterator[pa.RecordBatch]:
        """Pass batches of rows on, and keep the spellings of their labels, with the `location` of their lines."""
        for batch in batches:
            for label in pc.unique(batch["label"]).to_pylist():
                plain = plain_label(label)
                if plain is None or len(self._found) >= _MAX_KEPT:
                    continue
                spelling = plain if label == normalize("NFC", label.strip()) else label  # 1 and 1.0 are one spelling
                if spelling not in self._found:
                    line = batch["line"][pc.index(batch["label"], label).as_py()].as_py()
                    self._found[spelling] = (label, location(line))
            yield batch

    def notes(self) -> list[str]:
        """A sentence for each of the first few merged labels, and the number of the others."""
        merged: dict[str, list[str]] = {}
        for label, location in self._found.values():
            merged.setdefault(normalise_label(label) or "", []).append(f"{shortened(label)!r} ({location})")
        what = "become one label. If they are different classes, rename one."
        several = [group for group in merged.values() if len(group) > 1]
        notes = [f"labels {', '.join(group[:-1])} and {group[-1]} {what}" for group in several[:_MAX_LISTED]]
        if len(several) > _MAX_LISTED:
            notes.append(f"{len(several) - _MAX_LISTED} more groups of labels {what}")
        return notes
