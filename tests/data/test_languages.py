"""The language of a text by its script."""

from __future__ import annotations

import pytest

from indictune.data.languages import language_of


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
        ("bahut acchi film", "romanised"),
        ("Café", "romanised"),
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
        ("movie अच्छा", "romanised"),
        ("movies अच्छा", "romanised"),
        ("movie अच्छा है", "hi"),
        ("haaaaan कखगघ", "romanised"),
        ("ভালো। ভালো। है", "bn"),  # danda is Devanagari's, and counts for no script
        ("१२३४५६७८९ ok", "romanised"),  # so do digits
    ],
)
def test_the_script_with_more_letters_and_signs_wins(text: str, language: str) -> None:
    assert language_of(text) == language


@pytest.mark.parametrize("other", ["http @user @user http", "https://example.com/long/path @narendramodi_official"])
def test_urls_handles_and_placeholders_do_not_count(other: str) -> None:
    assert language_of(f"{other} वाह") == "hi"
    assert language_of(other) == "und"


def test_words_that_begin_like_a_placeholder_count() -> None:
    assert language_of("httpd है अ") == "romanised"
