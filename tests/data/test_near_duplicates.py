"""Held-out texts that nearly stand in the training rows."""

from __future__ import annotations

import random

import pytest

from indictune.data.health import findings
from indictune.data.health.findings import near_duplicates, near_groups

TWEET = "@user yeh film bahut achhi thi, sab log dekhne jao http"
HINDI = "यह फिल्म बहुत अच्छी थी, सब लोग देखने जाओ"


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (TWEET, "RT @user: Yeh film bahut achhi thi!! Sab log dekhne jao 🙏"),
        (TWEET, "yeh film bahut achhi thi sab log dekhne jaoo"),
        (HINDI, HINDI.replace(",", " ।").replace("जाओ", "जाओ 🙏")),
    ],
    ids=["retweet", "letter", "hindi"],
)
def test_a_text_that_differs_in_what_does_not_count_is_found(train: str, held_out: str) -> None:
    others = {7: "something else entirely, twenty letters", 9: train}
    assert near_duplicates(others, {2: "another long text, no", 3: held_out}) == {3: 9}


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        (TWEET, TWEET),  # a leaked row
        ("nice movie", "nice movie!"),  # too short
        (TWEET, "@user yeh gaana bahut bura tha, sab log mat suno http"),
    ],
    ids=["same", "short", "other"],
)
def test_other_texts_are_not(train: str, held_out: str) -> None:
    assert near_duplicates({0: train, 1: HINDI}, {0: held_out}) == {}


def test_a_text_with_the_same_twin_is_no_near_duplicate_of_another() -> None:
    assert near_duplicates({0: TWEET.upper(), 1: TWEET}, {0: TWEET}) == {}


def test_all_pairs_above_the_similarity_are_found_and_no_other() -> None:
    draw, letters = random.Random(0), "abcdefghij"

    def changed(text: str, times: int) -> str:
        for _ in range(times):
            place = draw.randrange(len(text))
            text = text[:place] + draw.choice(letters) + text[place + 1 :]
        return text

    train = ["".join(draw.choices(letters, k=120)) for _ in range(300)]
    held_out = [changed(text, number % 8) for number, text in enumerate(train)]
    pieces = [[{text[at : at + 5] for at in range(116)} for text in texts] for texts in (train, held_out)]
    similar = {
        number
        for number, (one, other) in enumerate(zip(*pieces, strict=True))
        if train[number] != held_out[number] and len(one & other) / len(one | other) >= 0.8
    }
    assert 50 < len(similar) < 200
    assert near_duplicates(dict(enumerate(train)), dict(enumerate(held_out))).keys() == similar


def test_groups_hold_equal_texts_and_those_that_resemble_one_of_them() -> None:
    other = "@user yeh gaana bahut bura tha, sab log mat suno http"
    texts = [TWEET, "nice movie", other, TWEET.upper(), "nice movie", "nice movie!", f"{TWEET} 🙏", HINDI]
    assert near_groups(texts).tolist() == [0, 1, 2, 0, 1, 3, 0, 4]
    assert near_groups([]).tolist() == []


def test_groups_are_found_among_more_rows_than_are_compared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_AT_ONCE", 3)
    draw = random.Random(0)
    alone = ["".join(draw.choices("abcdefghij", k=60)) for _ in range(10)]
    groups = near_groups([*alone, *(text.upper() for text in alone)])
    assert groups.tolist() == [*range(10), *range(10)]
