"""Tokenizers keep vowel signs; those that cannot are reported."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AlbertConfig, AutoTokenizer, BertConfig, PreTrainedTokenizerFast

from indictune.config.arguments import ModelArguments
from indictune.models.load import PROBES, load_tokenizer, lost_vowel_signs


@pytest.fixture
def albert_folder(tmp_path: Path) -> str:
    """What IndicBERT v1 publishes: a configuration and a SentencePiece model trained on Indic text, nothing else."""
    words = " ".join(PROBES.values()).split()
    shuffler = random.Random(0)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(" ".join(shuffler.sample(words, 6)) for _ in range(400)), encoding="utf-8")
    folder = tmp_path / "albert"
    sentencepiece.SentencePieceTrainer.train(
        input=str(lines),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=140,
        character_coverage=1.0,
        pad_id=0,
        unk_id=1,
        bos_id=-1,
        eos_id=-1,
        control_symbols=["[CLS]", "[SEP]"],
        user_defined_symbols=["[MASK]"],
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    AlbertConfig(vocab_size=140, embedding_size=16, hidden_size=64, num_attention_heads=2).save_pretrained(folder)
    (tmp_path / "spiece.model").rename(folder / "spiece.model")
    return str(folder)


def bert_folder(folder: Path, characters: Iterator[str]) -> str:
    """A BERT whose vocabulary is these characters, at the start of a word and inside it, and nothing else."""
    alphabet = list(dict.fromkeys(char for char in characters if not char.isspace()))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *alphabet, *(f"##{char}" for char in alphabet)]
    BertConfig(vocab_size=len(vocabulary), hidden_size=64, num_attention_heads=2).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    return str(folder)


def test_albert_by_default_loses_the_vowel_signs(albert_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(albert_folder)
    assert tokenizer.decode(tokenizer("में कुछ", add_special_tokens=False)["input_ids"]) == "म कछ"
    assert set(lost_vowel_signs(tokenizer)) == {"Devanagari", "Telugu", "Tamil"}


def test_albert_loaded_by_us_keeps_them(albert_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(ModelArguments(albert_folder))
    for text in PROBES.values():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert caplog.records == []


def test_albert_keeps_them_after_saving_without_us(albert_folder: str, tmp_path: Path) -> None:
    load_tokenizer(ModelArguments(albert_folder)).save_pretrained(tmp_path / "trained")
    AlbertConfig().save_pretrained(tmp_path / "trained")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trained")
    assert tokenizer.decode(tokenizer("में कुछ", add_special_tokens=False)["input_ids"]) == "में कुछ"


def test_bert_that_knows_the_signs_keeps_them(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path, iter("".join(PROBES.values())))
    assert "Devanagari" in lost_vowel_signs(AutoTokenizer.from_pretrained(folder))
    assert lost_vowel_signs(load_tokenizer(ModelArguments(folder))) == {}


def test_bert_trained_without_signs_stays_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the signs kept, whole words would become unknown to it."""
    bare = AutoTokenizer.from_pretrained(bert_folder(tmp_path / "all", iter("".join(PROBES.values()))))
    letters = "".join(bare.backend_tokenizer.normalizer.normalize_str(text) for text in PROBES.values())
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(ModelArguments(bert_folder(tmp_path / "bare", iter(letters))))
    assert tokenizer.tokenize("कुछ") == ["क", "##छ"]
    assert "loses vowel signs of Devanagari, Telugu, Tamil text" in caplog.text


def test_byte_level_tokens_count_as_what_they_decode_to() -> None:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        [], BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    assert lost_vowel_signs(tokenizer) == {}
