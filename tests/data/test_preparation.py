"""Cleaned rows to token ids."""

from __future__ import annotations

import pyarrow as pa
import pytest

from indictune.data.loading import Rows, Splits
from indictune.data.preparation import tokenise, tokenise_splits
from tests.models.tiny import words_tokenizer

LABELS = ["negative", "neutral", "positive"]


@pytest.fixture(autouse=True)
def _offline_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def rows(*texts_and_labels: tuple[str, str]) -> Rows:
    texts, labels = zip(*texts_and_labels, strict=True)
    columns = {
        "text": pa.array(texts),
        "label": pa.array(labels),
        "language": pa.array(["hi"] * len(texts)),
        "line": pa.array(range(2, 2 + len(texts)), pa.int32()),
    }
    return Rows(pa.table(columns), "t.csv", "--train_file")


def test_rows_become_token_ids_class_ids_and_lengths_in_their_order() -> None:
    # Ids: [PAD] 0, [UNK] 1, </s> 2, अच्छा 3, बुरा 4, మంచి 5, చెడు 6, நல்ல 7, மோசம் 8, ok 9, "." 10.
    train = rows(("अच्छा ok .", "positive"), ("बुरा", "negative"), ("cricket ok", "neutral"))
    assert tokenise(train, words_tokenizer(), LABELS, max_length=8).to_dict() == {
        "language": ["hi", "hi", "hi"],
        "input_ids": [[3, 9, 10], [4], [1, 9]],
        "labels": [2, 0, 1],
        "length": [3, 1, 2],
    }


def test_the_order_of_the_labels_numbers_the_classes() -> None:
    train = rows(("ok", "positive"), ("ok", "negative"))
    assert tokenise(train, words_tokenizer(), ["positive", "negative"], 8)["labels"][:] == [0, 1]


def test_texts_are_cut_to_max_length() -> None:
    cut = tokenise(rows(("ok ok ok . . .", "positive")), words_tokenizer(), LABELS, max_length=4)
    assert cut["input_ids"][:] == [[9, 9, 9, 10]]
    assert cut["length"][:] == [4]


def test_a_label_that_is_none_is_refused() -> None:
    with pytest.raises(KeyError, match="angry"):
        tokenise(rows(("ok", "angry")), words_tokenizer(), LABELS, 8)


def test_each_split_is_tokenised_and_one_that_is_not_there_stays_none() -> None:
    splits = Splits(rows(("ok", "positive")), None, rows((".", "negative")), LABELS)
    train, validation, test = tokenise_splits(splits, words_tokenizer(), LABELS, 8)
    assert train["input_ids"][:] == [[9]]
    assert validation is None
    assert test is not None
    assert test["input_ids"][:] == [[10]]
    assert test["labels"][:] == [0]
