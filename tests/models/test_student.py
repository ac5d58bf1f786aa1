"""A student has some layers of its teacher, and a tokenizer that splits the texts as before."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import Unigram, WordLevel, WordPiece
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from indictune.models.builtin import sample_rows
from indictune.models.student import layer_numbers, used_vocabulary, write_student
from tests.models.tiny import CONFIGS

TEXTS = [str(row["text"]) for row in sample_rows("train.jsonl")]
USED, OTHERS = TEXTS[:60], TEXTS[200:260]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
ARCHITECTURES = {"WordPiece": "bert", "Unigram": "xlm-roberta"}


@cache
def made_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 1,500 pieces of built-in tweets, with a token for masks behind them, as XLM-R has it."""
    models: dict[str, Any] = {
        "WordPiece": (WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer()),
        "Unigram": (Unigram(), partial(trainers.UnigramTrainer, unk_token="<unk>"), pre_tokenizers.Metaspace()),
        "WordLevel": (WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer, pre_tokenizers.Whitespace()),
    }
    model, trainer, splits = models[kind]
    backend = Tokenizer(model)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splits
    backend.train_from_iterator(TEXTS[:300], trainer(vocab_size=1_500, special_tokens=SPECIAL, show_progress=False))
    backend.add_special_tokens([AddedToken("<mask>", special=True)])
    start, end = ("<s>", 0), ("</s>", 2)
    template = processors.TemplateProcessing("<s> $A </s>", special_tokens=[start, end])
    backend.post_processor = processors.BertProcessing(end, start) if kind == "WordPiece" else template
    named = zip(("bos", "pad", "eos", "unk", "mask"), (*SPECIAL, "<mask>"), strict=True)
    special: dict[str, Any] = {f"{name}_token": token for name, token in named}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, cls_token="<s>", sep_token="</s>", **special
    )


def teacher_of(kind: str, architecture: str, folder: Path, layers: int) -> PreTrainedTokenizerFast:
    tokenizer, config = made_tokenizer(kind), CONFIGS[architecture]()
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = layers, len(tokenizer) + 3, 1
    if architecture == "modernbert":
        config.layer_types = (["full_attention", "sliding_attention", "sliding_attention"] * layers)[:layers]
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)
    return tokenizer


def pieces(tokenizer: Any, texts: list[str]) -> list[list[str]]:
    return [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts)["input_ids"]]


def test_layers_are_evenly_spaced_with_the_first_and_the_last() -> None:
    found = [layer_numbers(12, count) for count in (1, 2, 3, 4, 6, 12)]
    assert found == [[0], [0, 11], [0, 6, 11], [0, 4, 7, 11], [0, 2, 4, 7, 9, 11], [*range(12)]]
    assert layer_numbers(1, 1) == [0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_student_without_unused_pieces_reads_the_texts_as_its_teacher(kind: str, tmp_path: Path) -> None:
    """All layers are kept, so its logits are the teacher's; plain transformers reads it."""
    tokenizer = teacher_of(kind, ARCHITECTURES[kind], tmp_path / "teacher", layers=2)
    expected, before = (
        pieces(tokenizer, USED),
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "teacher"),
    )
    _, kept = used_vocabulary(tokenizer, USED)
    assert kept is not None
    assert len(kept) < len(tokenizer) - 300
    write_student(tmp_path / "teacher", tmp_path / "student", 2, tokenizer, USED)
    student: Any = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert pieces(student, USED) == expected
    assert sorted(student.get_vocab().values()) == [*range(len(kept))]
    after = AutoModelForSequenceClassification.from_pretrained(tmp_path / "student")
    with torch.inference_mode():
        for text in USED[:5]:
            sides = [(before, tokenizer), (after, student)]
            given = [(model.eval(), read(text, return_tensors="pt")["input_ids"]) for model, read in sides]
            torch.testing.assert_close(*(model(input_ids=ids).logits for model, ids in given))
    assert after.config.vocab_size == len(kept)
    assert student.convert_ids_to_tokens(after.config.pad_token_id) == "<pad>"


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_words_whose_pieces_are_gone_are_split_into_smaller_ones(kind: str) -> None:
    tokenizer = made_tokenizer(kind)
    found = used_vocabulary(tokenizer, USED)
    before, after = pieces(tokenizer, OTHERS), pieces(found[0], OTHERS)
    assert sum(map(len, after)) > sum(map(len, before))
    assert sum(row.count("<unk>") for row in after) <= sum(row.count("<unk>") for row in before)


def test_a_tokenizer_of_another_kind_stays_whole() -> None:
    tokenizer = made_tokenizer("WordLevel")
    assert used_vocabulary(tokenizer, USED) == (tokenizer, None)


@pytest.mark.parametrize("architecture", ["bert", "modernbert", "albert"])
def test_a_student_has_the_layers_that_were_chosen(architecture: str, tmp_path: Path) -> None:
    tokenizer = teacher_of("WordPiece", architecture, tmp_path / "teacher", layers=4)
    write_student(tmp_path / "teacher", tmp_path / "student", None, tokenizer, USED)
    folders = (tmp_path / "teacher", tmp_path / "student")
    teacher, student = (load_file(each / "model.safetensors") for each in folders)
    config = json.loads((tmp_path / "student/config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == 2
    if architecture == "albert":  # whose layers share their weights
        assert student.keys() == teacher.keys()
        return
    if architecture == "modernbert":
        assert config["layer_types"] == ["full_attention", "full_attention"]
    moved = {name: name.replace("layer.1.", "layer.3.").replace("layers.1.", "layers.3.") for name in student}
    assert any(name != of_teacher for name, of_teacher in moved.items())
    assert len(student) < len(teacher)
    for name, of_teacher in moved.items():
        if "embeddings" not in name:  # whose rows are fewer
            torch.testing.assert_close(student[name], teacher[of_teacher])
