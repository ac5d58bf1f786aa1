"""The built-in tweets: enough of them, balanced, apart from each other, and neither trivial nor hopeless."""

from __future__ import annotations

import importlib.resources
import json
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics import f1_score
from sklearn.naive_bayes import MultinomialNB

import indictune
from indictune.data.text.cleaning import clean

SPLITS = ("train", "validation", "test")
SCRIPTS = {"hi": "DEVANAGARI", "te": "TELUGU", "ta": "TAMIL"}
LABELS = {"positive", "negative", "neutral"}

Tweet = dict[str, str]


@cache
def tweets(split: str) -> list[Tweet]:
    text = importlib.resources.files("indictune.data").joinpath("samples", f"{split}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def all_tweets() -> list[Tweet]:
    return [tweet for split in SPLITS for tweet in tweets(split)]


def test_the_files_are_inside_the_package_and_part_of_what_is_installed() -> None:
    folder = Path(indictune.__file__).parent / "data" / "samples"
    assert sorted(path.name for path in folder.glob("*.jsonl")) == [f"{split}.jsonl" for split in sorted(SPLITS)]
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"data/samples/*.jsonl", "data/samples/*/*.jsonl"' in pyproject


def test_every_tweet_has_the_same_four_fields() -> None:
    for tweet in all_tweets():
        assert set(tweet) == {"text", "label", "language", "script"}
        assert tweet["label"] in LABELS
        assert tweet["language"] in SCRIPTS


def test_there_are_500_tweets_a_language_at_least() -> None:
    counts = Counter(tweet["language"] for tweet in all_tweets())
    assert counts.keys() == SCRIPTS.keys()
    assert min(counts.values()) >= 500


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_has_each_language_in_its_own_script_and_romanised(split: str) -> None:
    counts = Counter((tweet["language"], tweet["script"] == "Latn") for tweet in tweets(split))
    assert counts.keys() == {(language, romanised) for language in SCRIPTS for romanised in (False, True)}
    assert min(counts.values()) * 4 >= len(tweets(split)) / 6  # none is a curiosity


def test_the_script_is_what_the_text_is_written_in() -> None:
    for tweet in all_tweets():
        letters = [unicodedata.name(char, "").split()[0] for char in clean(tweet["text"]) if char.isalpha()]
        own = letters.count(SCRIPTS[tweet["language"]])
        assert (own == 0) if tweet["script"] == "Latn" else (2 * own > len(letters)), tweet["text"]


@pytest.mark.parametrize("split", SPLITS)
def test_labels_are_balanced_in_every_language_of_every_split(split: str) -> None:
    for language in SCRIPTS:
        counts = Counter(tweet["label"] for tweet in tweets(split) if tweet["language"] == language)
        assert counts.keys() == LABELS
        assert max(counts.values()) <= 1.1 * min(counts.values()), (language, counts)


def test_texts_are_nfc_and_never_empty() -> None:
    for tweet in all_tweets():
        assert unicodedata.is_normalized("NFC", tweet["text"])
        assert clean(tweet["text"])


def four_grams(text: str) -> frozenset[str]:
    text = clean(text).lower()
    return frozenset(text[start : start + 4] for start in range(max(1, len(text) - 3)))


@pytest.mark.more
@pytest.mark.parametrize(("left", "right"), [("train", "validation"), ("train", "test"), ("validation", "test")])
def test_no_tweet_of_a_split_is_nearly_one_of_another(left: str, right: str) -> None:
    """Nearly: at least half of the character 4-grams of the two are common to both (Jaccard)."""
    right_grams = [four_grams(tweet["text"]) for tweet in tweets(right)]
    for tweet in tweets(left):
        grams = four_grams(tweet["text"])
        for other, other_grams in zip(tweets(right), right_grams, strict=True):
            common = len(grams & other_grams)
            assert 2 * common < len(grams) + len(other_grams) - common, (tweet["text"], other["text"])


def test_a_naive_bayes_on_character_n_grams_finds_them_neither_easy_nor_hopeless() -> None:
    vectorizer = CountVectorizer(analyzer="char_wb", ngram_range=(1, 4), lowercase=True)
    train, test = ([clean(tweet["text"]) for tweet in tweets(split)] for split in ("train", "test"))
    model = MultinomialNB().fit(vectorizer.fit_transform(train), [tweet["label"] for tweet in tweets("train")])
    predicted = model.predict(vectorizer.transform(test))
    macro_f1 = f1_score([tweet["label"] for tweet in tweets("test")], predicted, average="macro")
    assert 0.6 < macro_f1 < 0.9, macro_f1
