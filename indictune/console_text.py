"""Plain text for consoles and logs: tables, lines and sizes, without control characters."""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from collections.abc import Sequence

COLUMN_GAP = "  "

# Control characters, marks that change the direction of writing, and half surrogate pairs. The latter stand for bytes
# of a file name that are no UTF-8. No stream takes them.
_ORDERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def table(header: Sequence[str], body: Sequence[Sequence[str]], footer: Sequence[str] | None = None) -> str:
    """Lines of equal display width: the first column to the left, the others, numbers, to the right.

    A rule sets header and footer off.
    """
    lines = [[in_one_line(cell) for cell in line] for line in (header, *body, *([footer] if footer else []))]
    widths = [max(map(display_width, column)) for column in zip(*lines, strict=True)]
    texts = [_aligned(line, widths) for line in lines]
    rule = "-" * display_width(texts[0])
    if footer:
        texts.insert(-1, rule)
    return "\n".join([texts[0], rule, *texts[1:]])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    blanks = [" " * (width - display_width(cell)) for cell, width in zip(cells, widths, strict=True)]
    numbers = [blank + cell for cell, blank in zip(cells[1:], blanks[1:], strict=True)]
    return COLUMN_GAP.join([cells[0] + blanks[0], *numbers])


def printable(text: str) -> str:
    """Escape the control characters of a text, as in `\\x1b`."""
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_one_line(text: str) -> str:
    """Escape a text for use inside one line, line breaks included."""
    return printable(text.replace("\n", "\\n").replace("\t", "\\t"))


def line_start(descriptor: int) -> str:
    """What begins a new line on a terminal, over a progress bar that any process is drawing; empty elsewhere."""
    if not os.isatty(descriptor):
        return ""
    return "\r" + " " * (os.get_terminal_size(descriptor).columns - 1) + "\r"


def shown_bytes(size: float) -> str:
    """A size in GB or MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def shown_rate(per_second: float) -> str:
    """A number a second as `1,234`, `3.4` or `0.31`."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def shown_language(language: str) -> str:
    """A language as people read it: a code says nothing where the language is not known."""
    return {"und-Latn": "Latin letters, not English", "und": "unknown"}.get(language, language)


def in_columns(text: str, width: int = 100) -> str:
    """Break long lines between words, and indent what follows. Words longer than a line stay whole."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in text.splitlines() for part in wrapper.wrap(line) or [""])


def display_width(text: str) -> int:
    """Count the terminal columns that a text takes.

    Marks that combine with the letter before them, and invisible format characters, take none. Wide characters take
    two: East Asian ones and most emoji (Unicode Standard Annex 11). All others take one, Indic vowel signs that stand
    next to their letter (category Mc) too. Emoji joined into one picture are counted one by one.
    """
    shown = [each for each in text if unicodedata.category(each) not in ("Mn", "Me", "Cf")]
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in shown)
