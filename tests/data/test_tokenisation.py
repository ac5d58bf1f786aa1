"""Cleaned rows to token ids."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.bert_japanese import BertJapaneseTokenizer

from indictune.config.arguments import DataArguments
from indictune.data.cache import StoredRows
from indictune.data.load_rows import load_splits
from indictune.data.row_choice import Splits
from indictune.data.text.tokenisation import schema_of, tokenise_splits, tokenised
from indictune.models import builtin
from tests.models.tiny import words_tokenizer
from tests.ranks.launching import python, start

LABELS = ["negative", "neutral", "positive"]
TEXTS = ["अच्छा है ok .", "மோசம் मोसम", "x" * 200, "😀 चलो_दिल्ली", "naïve @user http", "ok", "మంచి " * 30]


def rows(*texts_and_labels: tuple[str, str]) -> StoredRows:
    texts, labels = zip(*texts_and_labels, strict=True)
    columns = {
        "text": pa.array(texts),
        "label": pa.array(labels),
        "language": pa.array(["hi"] * len(texts)),
        "line": pa.array(range(2, 2 + len(texts)), pa.int64()),
    }
    return StoredRows(pa.table(columns), "t.csv", "--train_file")


def tokenise(rows: StoredRows, tokenizer: PreTrainedTokenizerBase, labels: list[str], max_length: int) -> Dataset:
    batches = tokenised(rows.table.to_batches(), tokenizer, labels, max_length)
    return Dataset(pa.Table.from_batches(batches, schema_of(labels, None)))


def test_rows_become_token_ids_class_ids_and_lengths_in_their_order() -> None:
    # Ids: [PAD] 0, [UNK] 1, </s> 2, अच्छा 3, बुरा 4, మంచి 5, చెడు 6, நல்ல 7, மோசம் 8, ok 9, "." 10.
    train = rows(("अच्छा ok .", "positive"), ("बुरा", "negative"), ("cricket ok", "neutral"))
    tokens = tokenise(train, words_tokenizer(), LABELS, max_length=8)
    assert tokens.to_dict() == {
        "language": ["hi", "hi", "hi"],
        "input_ids": [[3, 9, 10], [4], [1, 9]],
        "labels": [2, 0, 1],
        "length": [3, 1, 2],
    }
    assert tokens.features["input_ids"].feature.dtype == "int32"


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


def fast(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def word_pieces() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-bert"))
    return tokenizer


def sentence_pieces() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    backend.train_from_iterator(TEXTS * 3, UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>"))
    return fast(backend)


def bytes_and_merges() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS, BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], initial_alphabet=alphabet)
    )
    return fast(backend)


def cuts_on_the_left() -> PreTrainedTokenizerBase:
    tokenizer = word_pieces()
    tokenizer.truncation_side = "left"
    return tokenizer


def written_in_python(folder: Path, letters: str = "okxaचल") -> PreTrainedTokenizerBase:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, "##k", "##x"]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary), encoding="utf-8")
    return BertJapaneseTokenizer(  # type: ignore[no-untyped-call]
        str(folder / "vocab.txt"), word_tokenizer_type="basic"
    )


@pytest.mark.parametrize(
    "make",
    [word_pieces, sentence_pieces, bytes_and_merges, cuts_on_the_left, written_in_python],
)
@pytest.mark.parametrize("max_length", [5, 64])
def test_ids_are_those_of_the_tokenizers_own_call(make: object, max_length: int, tmp_path: Path) -> None:
    assert callable(make)
    tokenizer = make(tmp_path) if make is written_in_python else make()
    tokens = tokenise(rows(*((text, "neutral") for text in TEXTS * 100)), tokenizer, LABELS, max_length)
    expected = tokenizer(TEXTS, truncation=True, max_length=max_length)["input_ids"]
    assert len({tuple(ids) for ids in expected}) > 3
    assert tokens["input_ids"][:] == expected * 100
    assert tokens["length"][:7] == [len(ids) for ids in expected]


def test_the_tokenizer_is_the_same_whether_or_not_rows_had_to_be_prepared(splits: Splits[StoredRows]) -> None:
    """It is saved with the model."""
    tokenizer = words_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    for _ in range(2):  # the second time they are there
        tokenizer.backend_tokenizer.enable_truncation(max_length=7)
        tokenise_splits(splits, tokenizer, LABELS, 8)
        assert tokenizer.backend_tokenizer.to_str() == before


@pytest.fixture
def splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits[StoredRows]:
    """Three training rows and two test rows, in an empty cache."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.csv").write_text("text,label\nok ok,positive\n.,negative\nok,neutral\n")
    (tmp_path / "test.csv").write_text("text,label\n. .,negative\nok .,positive\n")
    return load_splits(DataArguments(train_file=str(tmp_path / "train.csv"), test_file=str(tmp_path / "test.csv")))


def test_each_split_is_tokenised(splits: Splits[StoredRows]) -> None:
    datasets = tokenise_splits(splits, words_tokenizer(), LABELS, 8)
    assert list(datasets) == ["train", "test"]
    train, test = datasets.values()
    assert train["input_ids"][:] == [[9, 9], [10], [9]]
    assert test["input_ids"][:] == [[10, 10], [9, 10]]
    assert test["labels"][:] == [0, 2]
    assert test["length"][:] == [2, 2]


def test_rows_that_reach_the_limit_are_reported_for_each_split(
    splits: Splits[StoredRows], caplog: pytest.LogCaptureFixture
) -> None:
    tokenise_splits(splits, words_tokenizer(), LABELS, 3)
    assert caplog.messages == []
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        tokenise_splits(splits, words_tokenizer(), LABELS, 2)
        train, test = caplog.messages
        assert train.startswith("--train_file ")
        assert train.endswith("train.csv: 1 of 3 rows (33.3%) reach --max_length 2; longer ones lose their ends.")
        assert "test.csv: 2 of 2 rows (100.0%) reach" in test


def test_a_second_call_tokenises_nothing(splits: Splits[StoredRows], monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenise_splits(splits, words_tokenizer(), LABELS, 8)["train"]
    monkeypatch.setattr("indictune.data.text.tokenisation.tokenised", lambda *_: pytest.fail("tokenised again"))
    second = tokenise_splits(splits, words_tokenizer(), LABELS, 8)["train"]
    assert second.to_dict() == first.to_dict()


def test_ids_are_made_anew_when_anything_changes(splits: Splits[StoredRows], tmp_path: Path) -> None:
    def names(rows: Splits[StoredRows], tokenizer: PreTrainedTokenizerBase, labels: list[str], max_length: int) -> str:
        return str(tokenise_splits(rows, tokenizer, labels, max_length)["train"]._fingerprint)

    tokenizer = words_tokenizer()
    first = names(splits, tokenizer, LABELS, 8)
    tokenizer(["ok ok ok"], truncation=True, max_length=2, padding="max_length")  # leaves a trace in the backend
    assert names(splits, tokenizer, LABELS, 8) == first
    other_word, other_side, special = words_tokenizer(), words_tokenizer(), words_tokenizer()
    other_word.add_tokens(["new"])
    other_side.truncation_side = "left"
    special.split_special_tokens = True
    (tmp_path / "train.csv").write_text("text,label\nok ok ok,positive\n.,negative\nok,neutral\n")
    other_rows = load_splits(DataArguments(train_file=str(tmp_path / "train.csv")))
    seen = [
        first,
        names(splits, other_word, LABELS, 8),
        names(splits, other_side, LABELS, 8),
        names(splits, special, LABELS, 8),
        names(splits, tokenizer, LABELS[::-1], 8),
        names(splits, tokenizer, LABELS, 7),
        names(other_rows, tokenizer, LABELS, 8),
        names(splits, written_in_python(tmp_path), LABELS, 8),
        names(splits, written_in_python(tmp_path, "koxaचल"), LABELS, 8),
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """The fewer rows are more than are held at once. Texts that are held would be seen, and ids too."""
    few, many, text = 100_000, 400_000, "ok . " * 20
    for name, number in (("few.csv", few), ("many.csv", many)):
        (tmp_path / name).write_text("text,label\n" + "".join(f"{text}{i},{'ab'[i % 2]}\n" for i in range(number)))
    command = [*python(), "tests/data/tokenise_twice.py", str(tmp_path / "few.csv"), str(tmp_path / "many.csv")]
    result = start(command, {"INDICTUNE_CACHE": str(tmp_path / "cache")})
    assert result.returncode == 0, result.stderr
    before, after = (1024 * int(number) for number in result.stdout.split())
    texts, ids = len(text) + 6, 4 * 41
    assert after - before < (many - few) * min(texts, ids), (before, after)
