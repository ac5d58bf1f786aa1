"""The small LLaMA: its files, and a tokenizer from which every text comes back."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from indictune.models import builtin

# Few on purpose: most letters of the words below never occur here.
TEXTS = ["खाना अच्छा है 😀", "సినిమా బాగుంది", "படம் நன்று", "bahut accha laga 🎉"] * 3

WORDS = {
    "hindi": "क्षेत्रों में",
    "hindi with nukta": "ज़िन्दगी",
    "hindi with a joiner": "क्‍ष",
    "telugu": "కృష్ణుడు",
    "telugu with a non-joiner": "హైదరాబాద్‌లో",
    "tamil": "கொடுமையௌ",
    "not normalised": "कि\u0301 க\u0bc6\u0bbe",
    "romanised": "Zabardast!",
    "spaces and lines": "  अच्छा   है \n\tok  ",
    "emoji and others": "🦖👨‍👩‍👧 良い Ａ",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    builtin.build_tiny_llama(TEXTS, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(built: Path) -> PreTrainedTokenizerBase:
    read: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(built)
    return read


@pytest.mark.parametrize("text", WORDS.values(), ids=WORDS.keys())
def test_every_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_a_word_of_the_texts_may_become_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """GPT-2's own pattern would cut it at each of its vowel signs."""
    assert len(tokenizer("సినిమా బాగుంది", add_special_tokens=False)["input_ids"]) == 2


def test_special_tokens_are_one_token_each(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [tokenizer(token, add_special_tokens=False)["input_ids"] for token in builtin.LLAMA_TOKENS]
    assert ids == [[0], [1], [2], [3], [4], [5]]
    text = "<|begin_of_text|>ok<|eot_id|>"
    ids_of_text = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (ids_of_text[0], ids_of_text[-1]) == (0, 2)
    assert tokenizer.decode(ids_of_text, skip_special_tokens=True) == "ok"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 2, 5)


def test_the_tokenizer_writes_out_conversations_as_llama_3_does(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "नमस्ते"}, {"role": "assistant", "content": "வணக்கம்"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nनमस्ते<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nவணக்கம்<|eot_id|>"
    )
    assert tokenizer.chat_template == builtin.LLAMA_TEMPLATE.read_text(encoding="utf-8")


def test_model_and_tokenizer_fit_each_other(built: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(built)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (128, 2, 512)
    assert config.vocab_size == len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 2, 5)
    assert tokenizer.model_max_length == 512
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_two_processes_build_the_same_bytes(built: Path, tmp_path: Path) -> None:
    build = f"build_tiny_llama({TEXTS!r}, sys.argv[1])"
    script = f"import sys; from indictune.models.builtin import build_tiny_llama; {build}"
    other_hashes = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=other_hashes)
    names = sorted(path.name for path in built.iterdir())
    assert names == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        digests = {hashlib.sha256((folder / name).read_bytes()).hexdigest() for folder in (built, tmp_path)}
        assert len(digests) == 1, name


def test_building_leaves_the_random_state_alone_and_does_not_follow_it(built: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    builtin.build_tiny_llama(TEXTS, tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert (tmp_path / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()


def test_the_real_one_is_made_of_the_built_in_tweets_and_chats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    texts = builtin.tweet_and_chat_texts()
    assert len(texts) > 700
    assert len(tokenizer) == builtin.VOCABULARY
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts
    # Bytes alone would be more than two tokens a character.
    assert sum(map(len, encoded)) < sum(map(len, texts)) / 2.5
