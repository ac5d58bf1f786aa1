"""Different spellings of one label: a number's are taken for one, and the user is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import normalise_label, plain_label, shortened

_MAX_KEPT = 2_000  # twice as many as a classifier's labels may be: of more, some are spelt in several ways
_MAX_LISTED = 5


class Spellings:
    """The first spellings of labels in all splits of a run, and where each stands."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def read(self, batches: Iterator[pa.RecordBatch], place: Callable[[int], str]) -> Iterator[pa.RecordBatch]:
        """Pass batches of rows on as they are read, and keep the spellings of their labels.

        Args:
            batches: columns `label` (nullable strings) and `line`.
            place: tells by its line where a row stands.
        """
        for batch in batches:
            if len(self._found) < _MAX_KEPT:
                self._keep(batch, place)
            yield batch

    def _keep(self, batch: pa.RecordBatch, place: Callable[[int], str]) -> None:
        for label in pc.unique(batch["label"]).to_pylist():
            plain = plain_label(label)
            if plain is None or plain in self._found:
                continue
            line = batch["line"][pc.index(batch["label"], label).as_py()].as_py()
            self._found[plain] = f"{shortened(label.strip())} ({place(line)})"
            if len(self._found) == _MAX_KEPT:
                return

    def notes(self) -> list[str]:
        """Which labels are taken for one though they differ by more than everybody expects, in a sentence each."""
        by_label: dict[str | None, list[str]] = {}
        for plain, found in self._found.items():
            by_label.setdefault(normalise_label(plain), []).append(found)
        several = {label: found for label, found in by_label.items() if len(found) > 1}
        notes = [
            f"labels {', '.join(found[:-1])} and {found[-1]} are one number, and taken for one label, {label}. "
            "If they are different classes, put a letter before them."
            for label, found in list(several.items())[:_MAX_LISTED]
        ]
        if len(several) > _MAX_LISTED:
            notes.append(f"{len(several) - _MAX_LISTED} more labels are numbers that are spelt in several ways.")
        return notes
