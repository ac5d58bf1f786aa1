"""Report labels with several spellings.

Spellings of one number, and spellings that differ in outer spaces or Unicode form, become one label. Labels that only
look alike stay different classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
            if len(self._found) < _MAX_KEPT:
                self._keep(batch, location)
            yield batch

    def _keep(self, batch: pa.RecordBatch, location: Callable[[int], str]) -> None:
        for label in pc.unique(batch["label"]).to_pylist():
            plain = plain_label(label)
            if plain is None:
                continue
            spelling = plain if label == normalize("NFC", label.strip()) else label  # 1 and 1.0 are one spelling
            if spelling in self._found:
                continue
            line = batch["line"][pc.index(batch["label"], label).as_py()].as_py()
            self._found[spelling] = (label, location(line))
            if len(self._found) == _MAX_KEPT:
                return

    def notes(self) -> list[str]:
        """A sentence for each merged label, and for each group of labels that look alike and stay apart."""
        by_plain: dict[str | None, list[str]] = {}
        by_number: dict[str | None, list[str]] = {}
        by_look: dict[str | None, list[str]] = {}
        for label, where in self._found.values():
            plain = plain_label(label)
            number = normalise_label(plain)
            if number is not None and number not in by_number:
                by_look.setdefault(_look(number), []).append(f"{shortened(label.strip())!r} ({where})")
            if plain not in by_plain:
                by_number.setdefault(number, []).append(f"{shortened(label.strip())} ({where})")
            by_plain.setdefault(plain, []).append(f"{shortened(label)!r} ({where})")
        return [
            *_notes(
                by_plain,
                "differ only in outer spaces or Unicode form, and become one label, {label}. If they are different "
                "classes, rename one.",
                "labels have spellings that differ in outer spaces or Unicode form.",
            ),
            *_notes(
                by_number,
                "are one number, and become one label, {label}. If they are different classes, put a letter before "
                "them.",
                "labels are numbers with several spellings.",
            ),
            *_notes(
                by_look,
                "look alike, and stay {count} classes. If they are one class, give them one spelling.",
                "labels look like others, and stay different classes.",
            ),
        ]


def _look(label: str) -> str:
    """A label without case, quotes around it, invisible characters and widths of spaces."""
    seen = "".join(each for each in label if category(each) != "Cf" and each not in _VARIATIONS)
    return " ".join(seen.casefold().split()).strip(_QUOTES)


def _notes(found: Mapping[str | None, Sequence[str]], what: str, more: str) -> Iterator[str]:
    """A sentence for each of the first few labels with several spellings, and the number of the others.

    Args:
        found: spellings of each label.
        what: end of a sentence, with `{label}` and `{count}` of its spellings.
        more: end of the sentence about the others.
    """
    several = {label: spellings for label, spellings in found.items() if len(spellings) > 1}
    for label, spellings in list(several.items())[:_MAX_LISTED]:
        first = ", ".join(spellings[:-1])
        yield f"labels {first} and {spellings[-1]} {what.format(label=label, count=len(spellings))}"
    if len(several) > _MAX_LISTED:
        yield f"{len(several) - _MAX_LISTED} more {more}"
