"""Letters that a program could not write, and has put a question mark for: what is left of a text is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

_LETTERS = r"[\x{370}-\x{1fff}]"  # of Indian scripts and others: such a file holds none
_WORD = r"(^|\s)\?{2,}(\s|$)"
_MANY = 0.05  # of rows; of 58,000 Hinglish and Tamil tweets as they were written, 1.1% have such a word at most


class LostLetters:
    """Counts the rows of a source that have words of question marks alone."""

    def __init__(self) -> None:
        self._rows = 0
        self._lost = 0
        self._first = ""

    def read(self, batches: Iterator[pa.RecordBatch], place: Callable[[int], str]) -> Iterator[pa.RecordBatch]:
        """Pass batches of rows on as they are read, and count.

        Args:
            batches: columns `text` (nullable strings) and `line`.
            place: tells by its line where a row stands.
        """
        for batch in batches:
            self._rows += batch.num_rows
            few = batch.filter(pc.match_substring(batch["text"], "??"))  # quicker than the patterns
            has_none = pc.invert(pc.match_substring_regex(few["text"], _LETTERS))
            lost = few.filter(pc.and_(has_none, pc.match_substring_regex(few["text"], _WORD)))
            if lost.num_rows and not self._first:
                self._first = place(lost["line"][0].as_py())
            self._lost += lost.num_rows
            yield batch

    def notes(self) -> list[str]:
        """What the user should know, in a sentence."""
        if self._lost <= _MANY * self._rows:
            return []
        return [
            f"{self._lost:,} of {self._rows:,} rows have words of question marks alone and no letter of an Indian "
            f'script, the first at {self._first}: so Excel leaves a text that it saves as "CSV (Comma delimited)". '
            'Save it anew from where it can be read, as "CSV UTF-8".'
        ]
