"""Find the language of a text: by its script, and English by a detector."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import compress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lingua import LanguageDetector

ENGLISH = "en"
LATIN = "und-Latn"  # BCP 47: Latin letters, of an unknown language
UNDETERMINED = "und"
# benchmarks/languages.py measures both. Texts longer than the head cost more and say no more.
_SURE = 0.5  # a text as English as all others together
_HEAD = 1000

# Script -> its largest language, and its letters and signs: first and last code point. Digits and danda are left out:
# other scripts borrow them. Name Marathi, Nepali or Assamese rows in a language column.
_SCRIPTS = {
    "Devanagari": ("hi", ((0x0900, 0x0963), (0x0971, 0x097F))),
    "Bengali": ("bn", ((0x0980, 0x09E5), (0x09F0, 0x09F1))),
    "Gurmukhi": ("pa", ((0x0A00, 0x0A65), (0x0A70, 0x0A7F))),
    "Gujarati": ("gu", ((0x0A80, 0x0AE5),)),
    "Oriya": ("or", ((0x0B00, 0x0B65), (0x0B70, 0x0B71))),
    "Tamil": ("ta", ((0x0B80, 0x0BE5),)),
    "Telugu": ("te", ((0x0C00, 0x0C65),)),
    "Kannada": ("kn", ((0x0C80, 0x0CE5),)),
    "Malayalam": ("ml", ((0x0D00, 0x0D65), (0x0D7A, 0x0D7F))),
    "Arabic": ("ur", ((0x0620, 0x065F), (0x066E, 0x06D3), (0x06FA, 0x06FF), (0x0750, 0x077F))),
    "Latin": (LATIN, ((0x0041, 0x005A), (0x0061, 0x007A), (0x00C0, 0x024F), (0x1E00, 0x1EFF))),
}
_LANGUAGE_OF_SCRIPT = {script: language for script, (language, _) in _SCRIPTS.items()}
_SCRIPT_OF_LETTER = {
    chr(code): script
    for script, (_, ranges) in _SCRIPTS.items()
    for first, last in ranges
    for code in range(first, last + 1)
}
# Codes of English and India's scheduled languages, as datasets have them; `bd` is Bodo in AI4Bharat's.
_CODE = re.compile("as|bd|bho|bn|brx|doi|en|gom|gu|hi|kn|kok|ks|mai|ml|mni|mr|ne|or|pa|sa|sat|sd|ta|te|ur")
# Of languages that have two letters (ISO 639-2 and 639-3), as FLORES and IN22 have them.
_SHORT_AND_LONG = (
    "as asm, bn ben, en eng, gu guj, hi hin, kn kan, ks kas, ml mal, mr mar, ne nep, ne npi, or ori, or ory, pa pan, "
    "sa san, sd snd, ta tam, te tel, ur urd"
)
_OF_THREE_LETTERS = {long: short for short, long in re.findall("(..) (...)", _SHORT_AND_LONG)}
_NAMED = re.compile(r"(?:.*?[-_.])??(?P<code>[A-Za-z]{2,3})(?:[-_](?:[A-Z]{2}|[A-Z][a-z]{3}))?")
NO_LETTERS = "no letters"
_ASCII_LETTER = re.compile(r"[A-Za-z]")
_NOT_LANGUAGE = re.compile(r"https?://\S+|\bhttp\b|@[A-Za-z0-9_]+")


def language_named(name: str) -> str | None:
    """The language that a configuration or a split names: `hi` of `hi`, `iitp-mr.hi`, `hi-IN` and `hin_Deva`."""
    match = _NAMED.fullmatch(name)
    code = match["code"].lower() if match else ""
    return code if _CODE.fullmatch(code) else _OF_THREE_LETTERS.get(code)


def language_of(text: str) -> str:
    """The language of one text: see `languages_of`."""
    return languages_of([text])[0]


def languages_of(texts: Iterable[str]) -> list[str]:
    """The language of each text: `hi`, `te`, `ta`, ..., `en`, `und-Latn` or `und`.

    The script that most of the text is written in stands for its largest language. Letters and vowel signs count alike
    ("अच्छा" weighs as much as "accha"); URLs, handles and their placeholders do not count. Where two scripts are even,
    the one whose letter comes first in the text wins. Latin text is `en` if lingua is more than half sure,
    else `und-Latn`: lingua knows no romanised Hindi, Telugu or Tamil. A text without letters or mostly in another
    script is `und`.
    """
    words = [_NOT_LANGUAGE.sub(" ", text) for text in texts]
    languages = [language_of_script(text) for text in words]
    latin = [index for index, language in enumerate(languages) if language == LATIN]
    if latin:
        from lingua import Language

        heads = [words[index][:_HEAD] for index in latin]
        sure = _detector().compute_language_confidence_in_parallel(heads, Language.ENGLISH)
        for index in compress(latin, (confidence >= _SURE for confidence in sure)):
            languages[index] = ENGLISH
    return languages


def language_of_script(text: str) -> str:
    """The language that the script of most letters stands for, `und-Latn` or `und`."""
    if text.isascii():
        return LATIN if _ASCII_LETTER.search(text) else UNDETERMINED
    return _LANGUAGE_OF_SCRIPT.get(_main_script(text, lambda _: "another"), UNDETERMINED)


def script_of(text: str) -> str:
    """The script of most letters, as Unicode names it, such as `Malayalam`; or `no letters`."""
    return _main_script(text, lambda letter: unicodedata.name(letter, "other").split()[0].capitalize())


def _main_script(text: str, name_other: Callable[[str], str]) -> str:
    """The script of most letters and signs of a text; `name_other` names the script of letters beyond `_SCRIPTS`."""
    counts: Counter[str] = Counter()
    # Counting characters in C first leaves some 30 look-ups for a tweet.
    for character, times in Counter(text).items():
        script = _SCRIPT_OF_LETTER.get(character) or (name_other(character) if character.isalpha() else "")
        if script:
            counts[script] += times
    return max(counts, key=counts.__getitem__, default=NO_LETTERS)


def scripts_of(texts: Iterable[str], languages: Iterable[str]) -> list[str]:
    """Whether each text is in its language's own script: `native`, `romanised`, or `none` for a text without letters.

    Latin text is `english` if its language is, else romanised. `languages` has the language of each text.
    """
    found = []
    for text, language in zip((_NOT_LANGUAGE.sub(" ", text) for text in texts), languages, strict=True):
        if language_of_script(text) == LATIN:
            is_english = language.lower().partition("-")[0] in ("en", "eng", "english")
            found.append("english" if is_english else "romanised")
        else:
            found.append("native" if any(map(str.isalpha, text)) else "none")
    return found


@functools.cache
def _detector() -> LanguageDetector:
    """Tells English from four languages that romanised Indic texts resemble. More languages cost memory and time."""
    from lingua import Language, LanguageDetectorBuilder

    others = (Language.INDONESIAN, Language.SWAHILI, Language.TAGALOG, Language.YORUBA)
    return LanguageDetectorBuilder.from_languages(Language.ENGLISH, *others).build()
