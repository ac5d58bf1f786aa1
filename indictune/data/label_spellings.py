"""Different spellings of one label: a number's, and those that differ in spaces around them or in Unicode's ways to
write a character, are taken for one. Labels that only look alike stay several. The user is told of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from unicodedata import category, normalize

import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import normalise_label, plain_label, shortened

_MAX_KEPT = 2_000  # twice as many as a classifier's labels may be: of more, some are spelt in several ways
_MAX_LISTED = 5
_QUOTES = "\"'`“”‘’ "
_VARIATIONS = "\ufe0e\ufe0f"  # of an emoji: black and white, or coloured


class Spellings:
    """The first spellings of labels in all splits of a run, each as it is written, and where it stands."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}

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
            if plain is None:
                continue
            spelling = plain if label == normalize("NFC", label.strip()) else label  # 1 and 1.0 are one spelling
            if spelling in self._found:
                continue
            line = batch["line"][pc.index(batch["label"], label).as_py()].as_py()
            self._found[spelling] = (label, place(line))
            if len(self._found) == _MAX_KEPT:
                return

    def notes(self) -> list[str]:
        """Which labels are taken for one though they differ by more than everybody expects, and which are not though
        they look alike, in a sentence each."""
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
                "differ only in spaces around them or in Unicode's ways to write a character, and are taken for one "
                "label, {label}. If they are different classes, rename one.",
                "labels are spelt in several ways by spaces around them or by Unicode's ways to write a character.",
            ),
            *_notes(
                by_number,
                "are one number, and taken for one label, {label}. If they are different classes, put a letter before "
                "them.",
                "labels are numbers that are spelt in several ways.",
            ),
            *_notes(
                by_look,
                "look alike, and stay {count} classes. If they are one, spell them in one way.",
                "labels have others that look alike, and stay classes of their own.",
            ),
        ]


def _look(label: str) -> str:
    """A label without what one overlooks: case, quotes around it, invisible characters, how wide a space is."""
    seen = "".join(each for each in label if category(each) != "Cf" and each not in _VARIATIONS)
    return " ".join(seen.casefold().split()).strip(_QUOTES)


def _notes(found: Mapping[str | None, Sequence[str]], what: str, more: str) -> Iterator[str]:
    """A sentence for each of the first few labels that are spelt in several ways, and the number of the others.

    Args:
        found: the spellings of each.
        what: of them, with `{label}` and their `{count}`.
        more: of the others.
    """
    several = {label: spellings for label, spellings in found.items() if len(spellings) > 1}
    for label, spellings in list(several.items())[:_MAX_LISTED]:
        first = ", ".join(spellings[:-1])
        yield f"labels {first} and {spellings[-1]} {what.format(label=label, count=len(spellings))}"
    if len(several) > _MAX_LISTED:
        yield f"{len(several) - _MAX_LISTED} more {more}"
