"""The language of a text: by its script, and English by a detector."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from indictune.console_text import shown_language
from indictune.data import languages
from indictune.data.languages import (
    language_of,
    language_of_script,
    languages_of,
    languages_of_scripts,
    scripts_of,
)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("फिल्म अच्छी है", "hi"),
        ("సినిమా బాగుంది", "te"),
        ("படம் நன்றாக", "ta"),
        ("ছবিটা ভালো", "bn"),
        ("ફિલ્મ સારી", "gu"),
        ("ਫਿਲਮ ਚੰਗੀ", "pa"),
        ("ಸಿನಿಮಾ ಚೆನ್ನಾಗಿದೆ", "kn"),
        ("സിനിമ കൊള്ളാം", "ml"),
        ("ൻൽ", "ml"),
        ("ଚଳଚ୍ଚିତ୍ର ଭଲ", "or"),
        ("فلم اچھی ہے", "ur"),
        ("bahut acchi film", "und-Latn"),
        ("Café", "und-Latn"),
        ("", "und"),
        ("123 !! \U0001f602 १२३ । ॥", "und"),
        ("это хорошо ok", "und"),
    ],
)
def test_a_script_stands_for_its_language(text: str, language: str) -> None:
    assert language_of(text) == language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("अच्छा movie", "hi"),  # 5 letters and signs, and 5 letters: the first wins
        ("movie अच्छा", "und-Latn"),
        ("movies अच्छा", "und-Latn"),
        ("movie अच्छा है", "hi"),
        ("haaaaan कखगघ", "und-Latn"),
        ("ভালো। ভালো। है", "bn"),  # danda is Devanagari's, and counts for no script
        ("१२३४५६७८९ ok", "und-Latn"),  # so do digits
    ],
)
def test_the_script_with_more_letters_and_signs_wins(text: str, language: str) -> None:
    assert language_of_script(text) == language


@pytest.mark.parametrize("other", ["http @user @user http", "https://example.com/long/path @narendramodi_official"])
def test_urls_handles_and_placeholders_do_not_count(other: str) -> None:
    assert language_of(f"{other} वाह") == "hi"
    assert language_of(other) == "und"


def test_words_that_begin_like_a_placeholder_count() -> None:
    assert language_of("httpd है अ") == "und-Latn"


@pytest.mark.parametrize(
    "text",
    [
        "The battery lasts two days and the screen is bright.",
        "Great phone, terrible battery \U0001f621",
        "worst movie ever",
        "The film was very good",
        "great film",
        "@user The songs were better than the story https://t.co/abc",
    ],
)
def test_english_is_called_english(text: str) -> None:
    assert language_of(text) == "en"


@pytest.mark.parametrize(
    "text",
    [
        "mujhe yeh gaana bilkul pasand nahi aaya",  # Hindi
        "cinema chala bagundi, heroine acting super",  # Telugu
        "naaku ee patalu asalu nachaledu",
        "padam romba nalla irukku, climax semma",  # Tamil
        "enakku indha paattu pidikkavillai",
        "le film était très bon et je le recommande",
        "ok",
        "a",
    ],
)
def test_other_latin_text_is_not(text: str) -> None:
    assert language_of(text) == "und-Latn"


def test_texts_keep_their_order() -> None:
    english = "This film was not as good as the book"
    texts = [english, "యే", "", "acchi film hai", english, "\U0001f602\U0001f602", "नहीं"]
    assert languages_of(texts) == ["en", "te", "und", "und-Latn", "en", "und", "hi"]
    assert languages_of([]) == []


def test_texts_together_get_the_scripts_of_each_alone() -> None:
    draw = random.Random(0)
    letters = "aZéअाితமக്ഷবએਫୌكбλ漢\U00031350\U0001f602\ud83d१।॥\u200d 1@"
    texts = ["".join(draw.choices(letters, k=draw.randint(0, 12))) for _ in range(3_000)]
    assert languages_of_scripts(texts) == list(map(language_of_script, texts))
    assert {*languages_of_scripts(texts)} >= {"hi", "te", "ta", "und", "und-Latn"}
    assert languages_of_scripts([]) == []


def test_a_word_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Counting:
        def compute_language_confidence_in_parallel(self, words: list[str], _: object) -> list[float]:
            asked.extend(words)
            return [0.9 if word == "good" else 0.1 for word in words]

    monkeypatch.setattr(languages, "_CONFIDENCE", {})
    monkeypatch.setattr(languages, "_detector", Counting)
    assert languages_of(["Good good film", "good bura bura bura", "film"]) == ["en", "und-Latn", "und-Latn"]
    assert languages_of(["bura good"]) == ["en"]
    assert sorted(asked) == ["bura", "film", "good"]


def test_indic_rows_need_no_detector() -> None:
    code = (
        "import sys, indictune.data.languages as found; found.language_of('फिल्म'); sys.exit('lingua' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_two_processes_agree() -> None:
    words = ["good", "film", "yaar", "the", "acchi", "was", "very", "semma", "not", "bagundi"]
    texts = [" ".join((words * 2)[start : start + length]) for start in range(10) for length in range(1, 9)]
    code = f"from indictune.data.languages import languages_of; print(languages_of({texts!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == repr(languages_of(texts))


def test_the_script_of_english_is_neither_native_nor_romanised() -> None:
    texts = ["बहुत अच्छा", "bahut accha", "very good", "very good", "123"]
    assert scripts_of(texts, ["hi", "hi", "en", "English", "en"]) == [
        "native", "romanised", "english", "english", "none",
    ]  # fmt: skip


def test_people_read_no_code_where_the_language_is_unknown() -> None:
    assert [shown_language(code) for code in ("hi", "und-Latn", "und")] == [
        "hi", "Latin letters, not English", "unknown",
    ]  # fmt: skip
