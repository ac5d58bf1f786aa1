"""Cleaning: what it replaces, and that it never touches a word."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indictune.data.text.cleaning import HANDLE_PLACEHOLDER, URL_PLACEHOLDER, clean

ZWNJ, ZWJ = "\u200c", "\u200d"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
ENGLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
INDIA = "\U0001f1ee\U0001f1f3"


def test_the_placeholders_are_those_of_the_tweet_models() -> None:
    assert (URL_PLACEHOLDER, HANDLE_PLACEHOLDER) == ("http", "@user")


@pytest.mark.parametrize(
    "text",
    [
        f"क्{ZWJ}ष और क्{ZWNJ}ष और क्ष",  # three spellings, three words
        f"र्{ZWJ}य",  # Marathi eyelash ra
        f"రాజ్{ZWNJ}కుమార్ ఫేస్{ZWNJ}బుక్",
        "క్షమించండి, సినిమా బాగుంది!",
        f"க்{ZWNJ}ஷ ஸ்ரீ கொடுமை",
        "वाह! क्या बात है। ॥ १२३ 123 Mast-Film… :) 50% ₹500 (सच?)",
        "मेरा e-mail ravi.k@example.in है",
        "C# और F#, we are #1, [#]",
        "Mr.he/she और/या 24/7 http",
        "@user http, @100 rs @ Delhi @",
        "R&notes; AT&T a&b &nosuchname; &",
        f"{FAMILY} {ENGLAND} {INDIA} \u2764\ufe0f \U0001f44d\U0001f3fd #\ufe0f\u20e3",
        "\ue000 private use stays",
    ],
)
def test_these_texts_stay_as_they_are(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("देखो https://t.co/abC1!", "देखो http!"),
        ("HTTP://X.in/a?b=1&c=2#d और", "http और"),
        ("(https://en.wikipedia.org/wiki/A_(b)).", "(http)."),
        ("https://hi.wikipedia.org/wiki/हिन्दी_भाषा। वाह", "http। वाह"),
        ("https://उदाहरण.भारत/क है", "http है"),
        ("www.example.in, www.", "http, www."),
        ("xwww.y.z", "xwww.y.z"),
        ("t.co/abc pic.twitter.com/x2, youtu.be/Zz", "http http, http"),
        ("सरhttps://t.co/abCदेखिए", "सर http देखिए"),
        ("https //t", "https //t"),
        ("https // t . co / oxf8tr3bly … https // t co / a https // t …", "http … http http …"),
    ],
)
def test_urls_become_one_placeholder_and_leave_their_neighbours(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("@narendramodi जी", "@user जी"),
        ("RT @a_1: wow..@B9", "RT @user: wow..@user"),
        ("मोदी@modiजी", "मोदी @user जी"),
        ("\U0001f602@modi\U0001f602", "\U0001f602 @user \U0001f602"),
        ("a@b.in @b", "a@b.in @user"),
        ("@ user04695 _ n _ k accha", "@user accha"),
        ("@ user accha", "@ user accha"),
        ("＠modi", "@user"),
    ],
)
def test_handles_become_one_placeholder(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("#चलो_दिल्ली", "चलो दिल्ली"),
        (f"#ఫేస్{ZWNJ}బుక్ #தமிழ்_வாழ்க", f"ఫేస్{ZWNJ}బుక్ தமிழ் வாழ்க"),
        ("#a#B2#c", "a B2 c"),
        ("\U0001f602#jaiho (#tag)", "\U0001f602 jaiho (tag)"),
        ("#15August ＃x", "15August x"),
        ("C#minor", "C#minor"),
    ],
)
def test_hashtags_stay_as_words(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  a\r\nb\tc\x00d\x95e\u2028f\u00a0\u3000g\x7f ", "a b c d e f g"),
        ("\ufeffnew\u200bword", "new word"),
        ("हि\u00adन्दी व\u2060ह \u2066ab\u2069c\u200f", "हिन्दी वह abc"),
        ("cut \ud83d here", "cut here"),
        ("a &lt;3 b &amp; c &#2344;&#x20B9;&#1;x &nbsp;", "a <3 b & c न₹ x"),
        ("&amp;amp;quot;", '"'),
        ("&amp;#64;modi #a_@b &#35;जय", "@user a @user जय"),
        ("e\u0301 क\u093c \u0958 à¤\u0915", "\u00e9 क\u093c क\u093c à¤\u0915"),
        ("", ""),
        (" \n\u200b", ""),
    ],
)
def test_spaces_entities_and_normal_form(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


# Characters that steps of cleaning look for, so that steps meet each other, among words of the scripts.
_PIECES = st.sampled_from(
    "@ # _ & ; ( ) . ! / // : 9 A x é co t user user12 http https:// www. t.co/ amp; #64; हिन्दी क् ष ా க । ＠ ＃ "
    f"{FAMILY} \U0001f602 \u0301 \u037e \u2060 \u200b {ZWJ} {ZWNJ}".split(" ")
) | st.sampled_from([" ", "\n", " // ", " t . co / "])


@settings(max_examples=300, derandomize=True)
@given(st.lists(_PIECES | st.characters(), max_size=12).map("".join))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean(text)
    assert clean(once) == once


def _words(text: str) -> list[str]:
    """All letters, marks, digits and joiners in their order."""
    kept = ("L", "M", "N")
    return [char for char in text if unicodedata.category(char)[0] in kept or char in (ZWJ, ZWNJ)]


def _visible(text: str) -> str:
    """Without the format character that cleaning leaves out: marks on both sides of it come together in NFC."""
    return text.replace("\u2066", "")


_INDIC = st.characters(min_codepoint=0x0900, max_codepoint=0x0D7F)
_NO_MARKUP = st.characters(exclude_characters="@＠&/", exclude_categories=["Cs", "Cf"])


@settings(max_examples=300, derandomize=True)
@given(st.text(st.sampled_from([ZWJ, ZWNJ, "#", "_", " ", "।", "\n", "\u2066"]) | _INDIC | _NO_MARKUP, max_size=30))
def test_cleaning_keeps_every_letter_mark_digit_and_joiner(text: str) -> None:
    if "www." in text.lower():
        return
    assert _words(clean(text)) == _words(unicodedata.normalize("NFC", _visible(text)))
