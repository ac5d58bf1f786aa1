"""Find texts whose letters a program replaced by question marks."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

_LETTERS = r"[\x{370}-\x{1fff}]"  # of Indian and other scripts; a damaged text has none
_WORD = r"(^|\s)\?{2,}(\s|$)"
_MANY = 0.05  # of rows; at most 1.1% of 58,000 original Hinglish and Tamil tweets have such a word


def lost_letters_notes(table: pa.Table, location: Callable[[int], str]) -> list[str]:
    """A sentence for the user, if many texts have words that are only question marks.

    Args:
        table: columns `text` and `line`.
        location: gives the location of a line.
    """
    lines: list[int] = []
    for batch in table.to_batches():
        few = batch.filter(pc.match_substring(batch["text"], "??"))  # faster than the patterns
        has_none = pc.invert(pc.match_substring_regex(few["text"], _LETTERS))
        lines += few["line"].filter(pc.and_(has_none, pc.match_substring_regex(few["text"], _WORD))).to_pylist()
    if len(lines) <= _MANY * len(table):
        return []
    return [
        f"{len(lines):,} of {len(table):,} rows have words that are only question marks and no letter of an "
        f'Indian script, the first at {location(lines[0])}. Excel writes such texts as "CSV (Comma delimited)". '
        'Save the original again as "CSV UTF-8".'
    ]
