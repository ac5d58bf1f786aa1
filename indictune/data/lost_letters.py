"""Find texts whose letters a program replaced by question marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

_LETTERS = r"[\x{370}-\x{1fff}]"  # of Indian and other scripts; a damaged text has none
_WORD = r"(^|\s)\?{2,}(\s|$)"
_MANY = 0.05  # of rows; at most 1.1% of 58,000 original Hinglish and Tamil tweets have such a word


class LostLetters:
    """Count the rows of a source with words that are only question marks."""

    def __init__(self) -> None:
        self._rows = 0
        self._lost = 0
        self._first = ""

    def read(self, batches: Iterator[pa.RecordBatch], location: Callable[[int], str]) -> Iterator[pa.RecordBatch]:
        """Pass batches of rows on, and count damaged rows.

        Args:
            batches: columns `text` (nullable strings) and `line`.
            location: gives the location of a line.
        """
        for batch in batches:
            self._rows += batch.num_rows
            few = batch.filter(pc.match_substring(batch["text"], "??"))  # faster than the patterns
            has_none = pc.invert(pc.match_substring_regex(few["text"], _LETTERS))
            lost = few.filter(pc.and_(has_none, pc.match_substring_regex(few["text"], _WORD)))
            if lost.num_rows and not self._first:
                self._first = location(lost["line"][0].as_py())
            self._lost += lost.num_rows
            yield batch

    def notes(self) -> list[str]:
        """A sentence for the user, if many rows are damaged."""
        if self._lost <= _MANY * self._rows:
            return []
        return [
            f"{self._lost:,} of {self._rows:,} rows have words that are only question marks and no letter of an "
            f'Indian script, the first at {self._first}. Excel writes such texts as "CSV (Comma delimited)". '
            'Save the original again as "CSV UTF-8".'
        ]
