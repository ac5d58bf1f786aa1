"""Clean social-media text in Indian scripts. Cleaning changes how a text is written, never its words."""

from __future__ import annotations

import html
import re
import unicodedata
from html.entities import html5

# The placeholders that XLM-T and the cardiffnlp models were trained with.
URL_PLACEHOLDER = "http"
HANDLE_PLACEHOLDER = "@user"

# `\w` alone cuts Indian words in two: it knows letters and digits, but no vowel sign, virama or joiner.
WORD = r"\w\u0300-\u036f\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff\u1cd0-\u1cff\ua8e0-\ua8ff\u200c\u200d"
LETTER_OF_TAG = r"(?=[\d_]*[^\W\d_])"

# Control characters, line and paragraph separators, the zero-width space (a word boundary) and lone surrogates.
BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b\ud800-\udfff]")
# Soft hyphen, bidi marks, word joiner, byte order mark and their like: invisible, and no boundary of a word. ZWJ and
# ZWNJ (U+200D, U+200C) and the tag characters of flags (U+E0020 to U+E007F) are meant and stay.
INVISIBLE = re.compile(r"[\xad\u061c\u180e\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0001]")
# Only whole names with their semicolon: a browser also reads "&not" in "R&notes", which would lose letters.
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")

# A URL ends before a letter of another script that follows its own letters (tweets glue the next word to it), goes on
# into such letters after a separator (/wiki/हिन्दी), and leaves the punctuation of the sentence alone.
_URL_END = r"[A-Za-z0-9/_=&#%+~$*@\-]"
_URL_FOREIGN = r"(?<=[/_=.?&%+#\-])[\u00c0-\u024f\u0620-\u06d3\u0900-\u0963\u0966-\u0dff\u200c\u200d]+"
_URL_TAIL = rf"(?:\([^\s()]*\)|[.,;:!?']*(?:{_URL_END}|{_URL_FOREIGN}))"
_HOSTS = r"t\.co|pic\.twitter\.com|bit\.ly|goo\.gl|youtu\.be|youtube\.com|fb\.me|wa\.me"
URL = re.compile(
    rf"https?://{_URL_TAIL}*|(?<![A-Za-z0-9.@])(?:www\.(?=[A-Za-z0-9])|(?:{_HOSTS})/){_URL_TAIL}+"
    # As corpora of tokenised tweets write a link, cut short or not: "https // t . co / oxf8tr3bly", "https // t . c".
    r"|(?<![A-Za-z0-9])https?(?: :)? //(?!\S)(?: t\b(?: \.)?(?: co?\b)?(?: /(?: [A-Za-z0-9]{1,10}\b)?)?)?",
    re.IGNORECASE,
)
# After a Latin letter or digit an @ belongs to an e-mail address. "@100" is a price: a handle has a letter. Tokenised
# corpora write "@ user123 _ rest".
HANDLE = re.compile(r"(?<![A-Za-z0-9_])[@＠](?:(?=[0-9_]*[A-Za-z])[A-Za-z0-9_]+| user[0-9]+(?: _+ [A-Za-z0-9]+)*)")
_HASHTAGS = re.compile(rf"(?<![{WORD}&/])(?:[#＃]{LETTER_OF_TAG}[{WORD}]+)+")
_TAG_SEPARATORS = re.compile(r"[#＃_]")
TOUCHING = frozenset(" !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~“”‘’…।॥")


def clean(text: str) -> str:
    """The text as the model sees it: one spelling of every character, placeholders, single spaces.

    - Unicode NFC; ZWJ and ZWNJ stay, because they change words. Letters, digits, case, danda and punctuation stay.
    - A URL becomes `http`, an @handle `@user`. The @ of an e-mail address is no handle.
    - Emoji stay whole. A hashtag stays as its words: `#चलो_दिल्ली` becomes `चलो दिल्ली`.
    - HTML entities (`&amp;`) become their characters; line breaks and control characters become a space.
    - Invisible format characters that separate nothing (soft hyphen, bidi marks, byte order mark) are left out.

    Cleaning a cleaned text changes nothing, so a text can pass through here twice, in training and in serving.
    """
    # One step can uncover work for another ("&amp;#64;user", "#a_@b"). Every change removes an entity, URL, handle or
    # tag, so this ends; a plain text passes once.
    while (cleaned := _clean_once(text)) != text:
        text = cleaned
    return text


def _clean_once(text: str) -> str:
    # The searches for a character come first because most tweets have nothing to replace.
    text = INVISIBLE.sub("", BREAKS.sub(" ", text))
    if "&" in text:
        text = _ENTITY.sub(_entity, text)
    text = unicodedata.normalize("NFC", text)
    if "/" in text or "www." in text.lower():
        text = URL.sub(lambda match: _apart(match, URL_PLACEHOLDER), text)
    if "#" in text or "＃" in text:
        text = _HASHTAGS.sub(lambda match: _apart(match, _TAG_SEPARATORS.sub(" ", match[0][1:])), text)
    if "@" in text or "＠" in text:
        text = HANDLE.sub(lambda match: _apart(match, HANDLE_PLACEHOLDER), text)
    return " ".join(text.split())


def _entity(match: re.Match[str]) -> str:
    entity = match[0]
    if entity.startswith("&#"):
        # One for a character that does not exist, such as "&#1;", is unescaped to nothing: keep the words apart.
        return html.unescape(entity) or " "
    return html5.get(entity[1:], entity)


def _apart(match: re.Match[str], new: str) -> str:
    """`new`, with a space on each side where a word or an emoji touches it."""
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 1]
    return ("" if not before or before in TOUCHING else " ") + new + ("" if not after or after in TOUCHING else " ")
