"""Find the language of a text: by its script, and English by a detector."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lingua import LanguageDetector

ENGLISH = "en"
LATIN = "und-Latn"  # BCP 47: Latin letters, of an unknown language
UNDETERMINED = "und"
# benchmarks/languages.py measures both. Texts longer than the head cost more and say no more.
_SURE = 0.36  # of the confidence that words are English, on average: one of five languages has 0.2 by chance
_HEAD = 1000
_MOST_WORDS = 500_000  # that are kept with their confidence, some 100 bytes each

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
_LATIN_WORD = re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]+")
_BY_NUMBER = ("", *_SCRIPTS, "another")  # scripts as `_script_numbers` counts them
_LAST_LETTER = 0x323AF  # of Unicode 17
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
    the one whose letter comes first in the text wins. Latin text is `en` if lingua takes its words for English,
    else `und-Latn`: lingua knows no romanised Hindi, Telugu or Tamil. A text without letters or mostly in another
    script is `und`.
    """
    words = [_NOT_LANGUAGE.sub(" ", text) if "@" in text or "http" in text else text for text in texts]
    languages = languages_of_scripts(words)
    latin = [index for index, language in enumerate(languages) if language == LATIN]
    if latin:
        in_words = [_LATIN_WORD.findall(words[index][:_HEAD].lower()) for index in latin]
        confidence = _confidence_in(set(chain.from_iterable(in_words)))
        for index, of_text in zip(latin, in_words, strict=True):
            if sum(map(confidence.__getitem__, of_text)) >= _SURE * max(len(of_text), 1):
                languages[index] = ENGLISH
    return languages


def _confidence_in(words: set[str]) -> dict[str, float]:
    """How sure lingua is that a word is English, for these words and others: each is looked up once.

    The mean over the words of a text shows romanised Hindi better than one look at the whole text does
    (benchmarks/languages.py). Most words of many tweets are known soon.
    """
    if len(_CONFIDENCE) > _MOST_WORDS:
        _CONFIDENCE.clear()
    if new := [*words - _CONFIDENCE.keys()]:
        from lingua import Language

        found = _detector().compute_language_confidence_in_parallel(new, Language.ENGLISH)
        _CONFIDENCE.update(zip(new, found, strict=True))
    return _CONFIDENCE


_CONFIDENCE: dict[str, float] = {}


def languages_of_scripts(texts: Sequence[str]) -> list[str]:
    """For each text, the language that the script of most letters stands for, `und-Latn` or `und`."""
    lengths = np.fromiter(map(len, texts), np.int32, len(texts))
    points = np.frombuffer("".join(texts).encode("utf-32-le", errors="surrogatepass"), np.uint32)
    numbers = _script_numbers()[np.minimum(points, _LAST_LETTER + 1)]
    kinds = len(_BY_NUMBER)
    places = np.repeat(np.arange(len(texts), dtype=np.int32) * np.int32(kinds), lengths) + numbers
    counts = np.bincount(places, minlength=len(texts) * kinds).reshape(-1, kinds)[:, 1:]
    most = counts.max(axis=1)
    found = [
        _LANGUAGE_OF_SCRIPT.get(_BY_NUMBER[number + 1], UNDETERMINED) for number in counts.argmax(axis=1).tolist()
    ]
    for index in np.flatnonzero((most == 0) | ((counts == most[:, None]).sum(axis=1) > 1)).tolist():
        found[index] = language_of_script(texts[index])
    return found


@functools.cache
def _script_numbers() -> npt.NDArray[np.uint8]:
    """For each code point, the number of its script in `_BY_NUMBER`; 0 for what counts for none."""
    numbers = np.zeros(_LAST_LETTER + 2, np.uint8)
    letters = np.fromiter(map(str.isalpha, map(chr, range(_LAST_LETTER + 1))), np.bool_, _LAST_LETTER + 1)
    numbers[:-1][letters] = _BY_NUMBER.index("another")
    for number, (_, ranges) in enumerate(_SCRIPTS.values(), 1):
        for first, last in ranges:
            numbers[first : last + 1] = number
    return numbers


def language_of_script(text: str) -> str:
    """As of `languages_of_scripts`, of one text."""
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
