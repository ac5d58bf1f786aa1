"""The cleaning of training as a normalizer of `tokenizers`, so that a saved model needs no other program to clean.

It uses the patterns of `cleaning.py`, in the syntax of Oniguruma. `tokenizers` can only replace matches by fixed
texts, and once. So rare texts come out differently: those with uncommon entities, or where one replacement makes room
for another (`&amp;#64;user`).
"""

from __future__ import annotations

import re

from tokenizers import Regex, normalizers

from indictune.data.cleaning import (
    BREAKS,
    HANDLE,
    HANDLE_PLACEHOLDER,
    INVISIBLE,
    LETTER_OF_TAG,
    TOUCHING,
    URL,
    URL_PLACEHOLDER,
    WORD,
)

# Each stands for a replaced match until its surroundings are spaced. No text has these private characters.
_URL, _TAG, _HANDLE = "\U0010fff0", "\U0010fff1", "\U0010fff2"
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&#39;": "'", "&#039;": "'", "&nbsp;": " "}
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")

_HASH = rf"[#＃]{LETTER_OF_TAG}"
_IN_WORD = f"[{WORD}]"
# A character that gets a space between itself and a placeholder.
_APART = f"[^{''.join(re.escape(each) for each in sorted(TOUCHING))}]".replace("&", r"\&")


def cleaning_steps() -> list[normalizers.Normalizer]:
    """The steps of `clean`, in their order."""
    return [
        _replace(BREAKS.pattern, " "),
        _replace(INVISIBLE.pattern, ""),
        _replace("&(?:amp;)+", "&"),
        *(normalizers.Replace(entity, character) for entity, character in _ENTITIES.items()),
        normalizers.NFC(),
        _replace(f"(?i){URL.pattern}", _URL),
        *_placed(_URL, URL_PLACEHOLDER),
        *_hashtags(),
        _replace(HANDLE.pattern, _HANDLE),
        *_placed(_HANDLE, HANDLE_PLACEHOLDER),
        _replace(r"\s+", " "),
        normalizers.Strip(),
    ]


def cut_after(characters: int, counts_spaces: bool) -> normalizers.Normalizer:
    """Drop what follows the first `characters` of a cleaned text."""
    each = "." if counts_spaces else " ?[^ ]"
    return _replace(rf"(?m)\A(?>(?:{each}){{{characters}}})\K.+", "")


def _hashtags() -> list[normalizers.Normalizer]:
    """Hashtags become their words. `\\K` keeps what was matched before it, and `\\G` is the end of the last match."""
    return [
        _replace(rf"(?<![{WORD}&/]){_HASH}", _TAG),
        _replace(rf"{_TAG}(?>(?:{_IN_WORD}|{_HASH})*)\K(?={_APART})", " "),
        _replace(rf"(?:{_TAG}|\G(?!\A))(?:(?!_){_IN_WORD})*\K(?:_|{_HASH})", " "),
        _replace(rf"(?<={_APART}){_TAG}", " "),
        normalizers.Replace(_TAG, ""),
    ]


def _placed(mark: str, placeholder: str) -> list[normalizers.Normalizer]:
    """The placeholder at each mark, with a space on each side where a word or an emoji touches it."""
    before, after = _replace(rf"(?<={_APART}){mark}", f" {mark}"), _replace(rf"{mark}(?={_APART})", f"{mark} ")
    return [before, after, normalizers.Replace(mark, placeholder)]


def _replace(pattern: str, content: str) -> normalizers.Normalizer:
    """Replace each match of a pattern of `re`."""
    # Rust's texts have no halves of surrogate pairs. A mark is no letter in Python, and part of a word in Oniguruma.
    pattern = pattern.replace(r"\ud800-\udfff", "").replace(r"[^\W\d_]", r"[\p{L}\p{Nl}\p{No}]")
    escaped = _ESCAPE.sub(lambda found: rf"\x{{{found[1] or found[2] or found[3]}}}", pattern)
    return normalizers.Replace(Regex(escaped), content)
