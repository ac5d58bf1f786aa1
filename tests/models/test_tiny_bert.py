"""The small BERT: its files, and a tokenizer that keeps every sign of a word."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from indictune.models import builtin

# Few and narrow on purpose: most letters of the words below never occur here.
TEXTS = ["खाना अच्छा है 😀", "సినిమా బాగుంది", "படம் நன்று", "bahut accha laga 🎉"] * 3
SMALL = builtin.Size(hidden_size=64, num_layers=1, vocab_size=1200, max_length=32)

WORDS = {
    "hindi": "क्षेत्रों",
    "hindi with nukta": "ज़िन्दगी",
    "hindi with a joiner": "क्‍ष",
    "telugu": "కృష్ణుడు",
    "telugu with a non-joiner": "హైదరాబాద్‌లో",
    "tamil": "கொடுமையௌ",
    "romanised": "zabardast",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    builtin.build_tiny_bert(TEXTS, folder, SMALL)
    return folder


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS.keys())
def test_every_letter_and_sign_of_a_word_comes_back(built: Path, word: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", word)


def test_words_that_differ_in_a_vowel_sign_or_a_joiner_differ_in_tokens(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    for one, other in [("की", "कि"), ("மலர", "மலர்"), ("రామ", "రాము"), ("क्ष", "क्‍ष")]:
        assert tokenizer(one)["input_ids"] != tokenizer(other)["input_ids"]


def test_an_unknown_emoji_hides_no_known_one(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert tokenizer.tokenize("🦖🎉😍😍") == ["[UNK]", "🎉", "😍", "😍"]


def test_texts_are_framed_lowercased_and_padded(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built)
    batch = tokenizer(["Accha", "accha laga"], padding=True)
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0]) == ["[CLS]", "accha", "[SEP]", "[PAD]"]
    assert batch["attention_mask"] == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert [tokenizer.convert_tokens_to_ids(token) for token in builtin.BERT_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.model_max_length == 32


def test_the_size_is_the_one_asked_for(built: Path) -> None:
    model = AutoModel.from_pretrained(built)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (64, 1, 32)
    assert (config.num_attention_heads, config.intermediate_size, config.pad_token_id) == (1, 256, 0)
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert config.vocab_size == len(tokenizer) <= 1200
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_two_processes_build_the_same_bytes(built: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from indictune.models import builtin; "
        f"builtin.build_tiny_bert({TEXTS!r}, sys.argv[1], builtin.Size(64, 1, 1200, 32))"
    )
    other_hashes = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=other_hashes)
    names = sorted(path.name for path in built.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (built, tmp_path)}
        assert len(digests) == 1, name


def test_building_leaves_the_random_state_alone_and_does_not_follow_it(built: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    builtin.build_tiny_bert(TEXTS, tmp_path, SMALL)
    assert torch.equal(before, torch.get_rng_state())
    assert (tmp_path / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()


def test_the_real_one_is_made_of_the_built_in_tweets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    folder = builtin.resolve("builtin:tiny-indic-bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = builtin.tweet_texts()
    assert len(texts) > 500
    assert 4000 <= len(tokenizer) <= 5000
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    assert ids.count(tokenizer.unk_token_id) < len(ids) / 1000
