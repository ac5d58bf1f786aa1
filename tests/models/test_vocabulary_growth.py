"""New pieces are used, change no other text, decode to what was written, and begin as the mean of their parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from indictune.commands.vocabulary import run_vocabulary
from tests.refusals import refused

ENGLISH = ["the film was very good and the day was bad", "a cat sat on the mat"] * 4
LETTERS = sorted("कखगचजतदनपबमयरलवसहािीेो्")
WORDS = ["सरकार", "नमस्कार", "कविता", "दिवस", "हवामान", "गावात"]
SECRET, RARE = "गोपनीय", "बलवान"


def texts() -> list[str]:
    """Texts of common words; one word stands in user names alone, and another in too few different texts."""
    rows = [f"{WORDS[at % 6]} {WORDS[at // 6 % 6]} {at}" for at in range(36)]
    rows += [f"@{SECRET} {SECRET}@x.org {at}" for at in range(9)]
    return [*rows, *([RARE] * 20), *(f"{RARE} {at}" for at in range(3))]


def untrained(form: str) -> Tokenizer:
    """A tokenizer that has learned English, and knows the letters of Devanagari."""
    special, trainer = ["<s>", "<unk>", "[UNK]"], cast(Any, None)
    if form == "bytes":
        made = Tokenizer(BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made.train_from_iterator(
            ENGLISH, BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special)
        )
    elif form == "Unigram":
        made = Tokenizer(Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        settings: dict[str, Any] = {"special_tokens": special, "unk_token": "<unk>", "initial_alphabet": LETTERS}
        made.train_from_iterator(ENGLISH, UnigramTrainer(vocab_size=90, **settings))
    else:
        made = Tokenizer(WordPiece(unk_token="[UNK]"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        inner = [f"##{letter}" for letter in LETTERS]
        trainer = WordPieceTrainer(vocab_size=150, special_tokens=[*special, *inner], initial_alphabet=LETTERS)
        made.train_from_iterator(ENGLISH, trainer)
    if form != "bytes":
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return made


def write_model(folder: Path, made: Tokenizer, tied: bool = False) -> None:
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>").save_pretrained(folder)  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = LlamaConfig(vocab_size=made.get_vocab_size() + 5, tie_word_embeddings=tied, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def extend(model: Path, tmp_path: Path, **flags: str) -> Path:
    (tmp_path / "t.txt").write_text("\n\n".join(texts()), encoding="utf-8")
    given = {"model": model, "train_file": tmp_path / "t.txt", "tokens": 60, "output_dir": tmp_path / "out"} | flags
    assert run_vocabulary({"": ["extend"], **{name: [str(value)] for name, value in given.items()}}) == 0
    return tmp_path / "out"


def all_pieces(folder: Path) -> str:
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["bytes", "Unigram", "WordPiece"])
def test_a_tokenizer_grows_and_its_model_with_it(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model", untrained(form), tied=form == "Unigram")
    grown = extend(tmp_path / "model", tmp_path)
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "model", grown))
    added = {*new.get_vocab().values()} - {*old.get_vocab().values()}
    assert 5 < len(added) <= 60
    for text in (*ENGLISH, "film 12", "The Mat!"):  # hold no new piece
        assert new(text)["input_ids"] == old(text)["input_ids"]
    text = " ".join(WORDS) + " कागद"
    before, after = (each(text, add_special_tokens=False)["input_ids"] for each in (old, new))
    assert len(after) < len(before) / 2
    assert new.decode(after) == old.decode(before)
    used = {each for row in texts() for each in new(row)["input_ids"]}
    assert len(added & used) > 5
    assert not any(char.isdigit() for piece in added for char in new.decode([piece]))
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", grown)]
    for table in ("get_input_embeddings", "get_output_embeddings"):
        was, now = (getattr(each, table)().weight for each in models)
        assert torch.equal(was[: len(old)], now[: len(old)])
        one = max(added & used)
        assert len(now) > one
        if form != "WordPiece":  # which reads a piece inside a word otherwise than alone
            written = str(new.convert_ids_to_tokens(one))
            parts = old(written.replace("▁", " ").strip() if form != "bytes" else written, add_special_tokens=False)
            if form == "bytes":
                torch.testing.assert_close(now[one], was[parts["input_ids"]].mean(0))
    shown = capsys.readouterr().out
    assert "Devanagari" in shown
    assert "tokens a word before" in shown


def test_what_few_texts_or_user_names_hold_becomes_no_piece(tmp_path: Path) -> None:
    write_model(tmp_path / "model", untrained("WordPiece"))
    held = all_pieces(extend(tmp_path / "model", tmp_path))
    vocabulary = json.loads(held)["model"]["vocab"]
    assert any(len(piece.removeprefix("##")) > 3 for piece in vocabulary if piece[-1] in "".join(WORDS))
    for word in (SECRET, RARE):
        learned = [piece for piece in vocabulary if len(bare := piece.removeprefix("##")) > 2 and bare in word]
        assert [piece for piece in learned if not any(piece.removeprefix("##") in each for each in WORDS)] == []


def test_tokenizers_that_cannot_grow_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n\n".join(texts()), encoding="utf-8")
    characters = Tokenizer(BPE(vocab={"<s>": 0, "<unk>": 1, "a": 2}, merges=[], unk_token="<unk>"))
    words = Tokenizer(WordLevel({"<s>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    for number, made in enumerate((characters, words)):
        write_model(tmp_path / str(number), made)
        with refused("tokenizer-cannot-grow", flag="--model"):
            extend(tmp_path / str(number), tmp_path)
    write_model(tmp_path / "model", untrained("WordPiece"))
    with refused("no-pieces-learned", flag="--train_file"):
        extend(tmp_path / "model", tmp_path, min_tokens_per_word="50")
    given: dict[str, Any] = {"": ["shrink"], "model": ["x"]}
    with refused("no-such-name"):
        run_vocabulary(given)
    assert not (tmp_path / "out").exists()
