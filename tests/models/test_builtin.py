"""The built-in model: its files, its cache, and a tokenizer that keeps every sign of a word."""

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

from indictune.errors import UserError
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
    builtin.build(TEXTS, folder, SMALL)
    return folder


@pytest.fixture
def tweets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A few tweets instead of the built-in ones, a small size, and an empty cache."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "sample_texts", lambda: TEXTS)
    monkeypatch.setitem(builtin.SIZES, "tiny-indic-bert", SMALL)
    return tmp_path / "cache"


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
    assert [tokenizer.convert_tokens_to_ids(token) for token in builtin.SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
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


def test_two_processes_build_the_same_bytes(built: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from indictune.models import builtin; "
        f"builtin.build({TEXTS!r}, sys.argv[1], builtin.Size(64, 1, 1200, 32))"
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
    builtin.build(TEXTS, tmp_path, SMALL)
    assert torch.equal(before, torch.get_rng_state())
    assert (tmp_path / "model.safetensors").read_bytes() == (built / "model.safetensors").read_bytes()


def test_it_is_built_once_and_then_read(tweets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin.resolve("builtin:tiny-indic-bert")
    assert Path(folder).parent == tweets
    monkeypatch.setattr(builtin, "build", lambda *_: pytest.fail("built twice"))
    assert builtin.resolve("builtin:tiny-indic-bert") == folder
    assert [path.name for path in tweets.iterdir()] == [Path(folder).name]


@pytest.mark.parametrize("change", ["texts", "size", "recipe"])
def test_whatever_it_is_made_from_names_its_folder(tweets: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    before = builtin.resolve("builtin:tiny-indic-bert")
    if change == "texts":
        monkeypatch.setattr(builtin, "sample_texts", lambda: [*TEXTS, "नया"])
    elif change == "size":
        monkeypatch.setitem(builtin.SIZES, "tiny-indic-bert", builtin.Size(64, 1, 1300, 32))
    else:
        monkeypatch.setattr(builtin, "RECIPE_VERSION", builtin.RECIPE_VERSION + 1)
    assert builtin.resolve("builtin:tiny-indic-bert") != before


def test_a_process_that_comes_second_takes_the_folder_of_the_first(
    tweets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = builtin.build

    def build_while_another_finishes(texts: list[str], folder: Path, size: builtin.Size) -> None:
        build(texts, folder, size)
        name = folder.name.removeprefix(".").rpartition("-")[0]
        (tweets / name).mkdir()
        (tweets / name / "config.json").write_text("of the first")

    monkeypatch.setattr(builtin, "build", build_while_another_finishes)
    folder = Path(builtin.resolve("builtin:tiny-indic-bert"))
    assert (folder / "config.json").read_text() == "of the first"
    assert list(tweets.iterdir()) == [folder]


def test_a_build_that_breaks_leaves_nothing(tweets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(texts: list[str], folder: Path, size: builtin.Size) -> None:
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(builtin, "build", broken)
    with pytest.raises(OSError, match="disk full"):
        builtin.resolve("builtin:tiny-indic-bert")
    assert list(tweets.iterdir()) == []


def test_an_unknown_name_is_told_with_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"builtin:huge.*no such built-in model.*builtin:tiny-indic-bert"):
        builtin.resolve("builtin:huge")


def test_other_names_are_left_alone() -> None:
    assert builtin.resolve("ai4bharat/IndicBERTv2-MLM-only") == "ai4bharat/IndicBERTv2-MLM-only"


def test_the_real_one_is_made_of_the_built_in_tweets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    folder = builtin.resolve("builtin:tiny-indic-bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = builtin.sample_texts()
    assert len(texts) > 500
    assert 4000 <= len(tokenizer) <= 5000
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    assert ids.count(tokenizer.unk_token_id) < len(ids) / 1000
