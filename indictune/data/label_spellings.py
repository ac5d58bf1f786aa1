"""Report labels with several spellings: those that become one label, and those that only look alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from unicodedata import category, normalize

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import normalise_label, plain_label, shortened

_MAX_KEPT = 2_000  # twice the number of labels that a classifier may have
_MAX_LISTED = 5
_QUOTES = "\"'`“”‘’ "
_VARIATIONS = "\ufe0e\ufe0f"  # of an emoji: black and white, or coloured


class Spellings:
    """Collect the spellings of labels in all splits of a run, with their first locations."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}

    def read(self, batches: Iterator[pa.RecordBatch], location: Callable[[int], str]) -> Iterator[pa.RecordBatch]:
        """Pass batches of rows on, and keep the spellings of their labels.

        Args:
            batches: columns `label` (nullable strings) and `line`.
            location: gives the location of a line.
        """
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
        """A sentence for each merged label, and for each group of labels that look alike and stay apart."""
        merged: dict[str, list[str]] = {}
        alike: dict[str, list[str]] = {}
        for label, location in self._found.values():
            name, spelling = normalise_label(label) or "", f"{shortened(label)!r} ({location})"
            if name not in merged:
                alike.setdefault(_look(name), []).append(spelling)
            merged.setdefault(name, []).append(spelling)
        return [
            *_notes(merged.values(), "become one label. If they are different classes, rename one."),
            *_notes(alike.values(), "look alike, and stay different classes. If they are one class, rename one."),
        ]


def _look(label: str) -> str:
    """A label without case, quotes around it, invisible characters and widths of spaces."""
    seen = "".join(each for each in label if category(each) != "Cf" and each not in _VARIATIONS)
    return " ".join(seen.casefold().split()).strip(_QUOTES)


def _notes(groups: Iterable[Sequence[str]], what: str) -> list[str]:
    """A sentence for each of the first few groups of several spellings, and the number of the others."""
    several = [f"labels {', '.join(group[:-1])} and {group[-1]} {what}" for group in groups if len(group) > 1]
    if len(several) > _MAX_LISTED:
        several[_MAX_LISTED:] = [f"{len(several) - _MAX_LISTED} more groups of labels {what}"]
    return several
