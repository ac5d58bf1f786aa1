"""Derive the language of a text from its script."""

from __future__ import annotations

import re
from collections import Counter

ROMANISED = "romanised"
UNDETERMINED = "und"

# Letters and signs of a script: first and last code point. Digits and danda are left out: other scripts borrow them.
# A script stands for its largest language; name Marathi, Nepali or Assamese rows in a language column.
_SCRIPTS = {
    "hi": ((0x0900, 0x0963), (0x0971, 0x097F)),
    "bn": ((0x0980, 0x09E5), (0x09F0, 0x09F1)),
    "pa": ((0x0A00, 0x0A65), (0x0A70, 0x0A7F)),
    "gu": ((0x0A80, 0x0AE5),),
    "or": ((0x0B00, 0x0B65), (0x0B70, 0x0B71)),
    "ta": ((0x0B80, 0x0BE5),),
    "te": ((0x0C00, 0x0C65),),
    "kn": ((0x0C80, 0x0CE5),),
    "ml": ((0x0D00, 0x0D65), (0x0D7A, 0x0D7F)),
    "ur": ((0x0620, 0x065F), (0x066E, 0x06D3), (0x06FA, 0x06FF), (0x0750, 0x077F)),
    ROMANISED: ((0x0041, 0x005A), (0x0061, 0x007A), (0x00C0, 0x024F), (0x1E00, 0x1EFF)),
}
_LANGUAGE_OF_LETTER = {
    chr(code): language
    for language, ranges in _SCRIPTS.items()
    for first, last in ranges
    for code in range(first, last + 1)
}
_ASCII_LETTER = re.compile(r"[A-Za-z]")
_NOT_LANGUAGE = re.compile(r"https?://\S+|\bhttp\b|@[A-Za-z0-9_]+")


def language_of(text: str) -> str:
    """The language of the script that most of the text is written in: `hi`, `te`, `ta`, ..., `romanised` or `und`.

    Letters and vowel signs count alike ("अच्छा" weighs as much as "accha"); URLs, handles and their placeholders do not
    count. Latin is `romanised`, a text without letters or mostly in another script `und`. Where two scripts are even,
    the one whose letter comes first in the text wins.
    """
    text = _NOT_LANGUAGE.sub(" ", text)
    if text.isascii():
        return ROMANISED if _ASCII_LETTER.search(text) else UNDETERMINED
    counts: Counter[str] = Counter()
    # Counting characters in C first leaves some 30 look-ups for a tweet.
    for character, times in Counter(text).items():
        language = _LANGUAGE_OF_LETTER.get(character)
        if language is not None:
            counts[language] += times
        elif character.isalpha():
            counts[UNDETERMINED] += times
    return max(counts, key=counts.__getitem__, default=UNDETERMINED)
