"""A saved tokenizer cleans and cuts as training did, whatever its class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import (
    AlbertConfig,
    AlbertTokenizer,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    PreTrainedConfig,
    XLMRobertaConfig,
    XLMRobertaTokenizer,
)

from indictune.data.text.cleaning import clean
from indictune.models.builtin import sample_rows
from indictune.models.serving_model import cleaning_steps, serve_as_trained, without_cleaning

LETTERS = [*map(chr, range(0x21, 0x7F)), *map(chr, range(0x900, 0x980)), *map(chr, range(0xB80, 0xC80))]
PIECES = [("▁", -2.0), *((letter, -5.0) for letter in LETTERS), ("http", -3.0), ("▁http", -3.0)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert() -> Any:
    pieces = [*SPECIAL, "http", "user", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return BertTokenizer(vocab=vocabulary, do_lower_case=False, strip_accents=False)


def albert() -> Any:
    special = [(name, 0.0) for name in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")]
    return AlbertTokenizer(vocab=[*special, *PIECES], keep_accents=True, do_lower_case=False)


def xlm_roberta() -> Any:
    return XLMRobertaTokenizer(vocab=[*((name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")), *PIECES])


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (bert, BertConfig()),
        pytest.param(albert, AlbertConfig(), marks=pytest.mark.more),
        (xlm_roberta, XLMRobertaConfig(max_position_embeddings=514)),
    ],
    ids=["bert", "albert", "xlm-roberta"],
)
def test_raw_texts_get_the_tokens_of_cleaned_ones(
    make: Callable[[], Any], config: PreTrainedConfig, tmp_path: Path
) -> None:
    own = make()
    config.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    serve_as_trained(tmp_path, own, config, 40)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    texts = [row["text"] for row in sample_rows("train.jsonl")]
    expected = own([clean(text) for text in texts], truncation=True, max_length=40)
    assert dict(saved(texts, truncation=True)) == dict(expected)
    assert saved(texts)["input_ids"] != expected["input_ids"]
    # Programs that read tokenizer.json alone cut too.
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [each.ids for each in alone.encode_batch(texts)] == expected["input_ids"]
    # No text has more tokens than the model has positions, and no text of few tokens loses any.
    assert 300 < len(saved("a# " * 1_000 + "ि" * 3_000)["input_ids"]) <= 512
    assert len(saved("ab " * 150)["input_ids"]) > 300
    without_cleaning(saved)
    assert saved("😂@user")["input_ids"] != expected["input_ids"]
    assert dict(saved([clean(text) for text in texts], truncation=True)) == dict(expected)


def test_a_second_training_cleans_once(tmp_path: Path) -> None:
    own = bert()
    BertConfig().save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    serve_as_trained(tmp_path, own, BertConfig(), 40)
    first = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["normalizer"]
    again = AutoTokenizer.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path)
    serve_as_trained(tmp_path, again, BertConfig(), 50)
    assert json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))["normalizer"] == first
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 50
    assert len(first["normalizers"][0]["normalizers"]) == len(cleaning_steps()) + 1


def test_a_run_on_long_texts_cuts_none_by_characters(tmp_path: Path) -> None:
    own = bert()
    BertConfig().save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    serve_as_trained(tmp_path, own, BertConfig(), 512)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert len(saved("a " * 1_000)["input_ids"]) == 1_002
    assert len(saved("a " * 1_000, truncation=True)["input_ids"]) == 512
