"""Texts that a tokenizer cannot read: told by language and script, and refused where they are most."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from indictune.config.recipe import read_recipe
from indictune.data.health.tokenizer_health import UnknownTokens, unknown_tokens
from indictune.data.languages import script_of
from indictune.preflight.checks import read_rows
from indictune.preflight.values import plan_of_rows
from indictune.tasks.classification import Classification, ClassifiedRows
from indictune.tasks.tokens import TokenClassification
from tests.refusals import refused


def tokenizer_of(*words: str, unk_token: str | None = "[UNK]") -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unk_token)  # type: ignore[no-untyped-call]


def measured(rows: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> list[UnknownTokens]:
    languages, texts = zip(*rows, strict=True)
    return list(unknown_tokens(texts, pa.chunked_array([languages]), tokenizer))


def test_unknown_tokens_are_counted_by_language_and_script() -> None:
    rows = [("ml", "നല്ല സിനിമ good"), ("hi", "ok फिल्म"), ("ml", "good good"), ("hi", "फिल्म"), ("hi", "🙂")]
    assert measured(rows, tokenizer_of("good", "ok", "फिल्म")) == [
        UnknownTokens("ml", "Malayalam", 3, 2, 1 / 5),
        UnknownTokens("ml", "Latin", 2, 0, 1 / 5),
        UnknownTokens("hi", "Devanagari", 3, 0, 2 / 5),
        UnknownTokens("hi", "no letters", 1, 1, 1 / 5),
    ]


def test_a_tokenizer_without_an_unknown_token_is_not_measured() -> None:
    assert measured([("hi", "फिल्म")], tokenizer_of("good", unk_token=None)) == []


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("படம் ok", "Tamil"),
        ("ok பட", "Latin"),
        ("ok हिं", "Devanagari"),
        ("да ok нет", "Cyrillic"),
        ("12 🙂", "no letters"),
    ],
)
def test_the_script_of_a_text_is_that_of_most_letters_and_signs(text: str, script: str) -> None:
    assert script_of(text) == script


def classified(path: Path, texts: Sequence[str], *flags: str) -> ClassifiedRows:
    """The rows of a run of the built-in model, which knows Devanagari and no Malayalam."""
    rows = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = Classification()
    recipe = read_recipe(
        ["--train_file", str(path), "--output_dir", "out", "--validation_split", "0", *flags], task.arguments()
    )
    plan, problems = plan_of_rows(recipe, task)
    return read_rows(plan, task, problems)


HINDI, MALAYALAM = ["यह फिल्म अच्छी है"], ["ഇത് നല്ല സിനിമയാണ്"]


def test_a_language_that_is_mostly_unknown_stops_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    with refused("unknown-tokens", "ml (Malayalam)", flag="--model_name_or_path"):
        classified(path, HINDI * 98 + MALAYALAM * 2)
    caplog.set_level(logging.INFO)
    classified(path, HINDI * 98 + MALAYALAM * 2, "--max_unknown_share", "1")
    assert "ml (Malayalam) 100.0%" in caplog.text
    caplog.clear()
    classified(path, HINDI * 98 + MALAYALAM * 2, "--vocabulary_from_train", "2000")
    assert "unknown tokens" not in caplog.text


def test_texts_of_a_wrong_encoding_are_named_as_such(tmp_path: Path) -> None:
    damaged = ["नमस्ते दुनिया".encode().decode("latin-1")]
    with refused("unknown-tokens", "ftfy.fix_encoding"):
        classified(tmp_path / "t.jsonl", HINDI * 8 + damaged * 2)
    with refused("unknown-tokens", "1 texts", "--max_unknown_share"):  # of which most are in a script without mistakes
        classified(tmp_path / "t.jsonl", HINDI * 8 + MALAYALAM * 8 + damaged)


@pytest.mark.parametrize("texts", [HINDI * 200 + MALAYALAM, HINDI * 80 + ["🫠🫠"] * 20], ids=["stray", "emoji"])
def test_a_stray_text_and_emoji_stop_nothing(tmp_path: Path, texts: list[str]) -> None:
    assert classified(tmp_path / "t.jsonl", texts).labels == ["a", "b"]


def test_words_with_tags_are_measured_too(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("സീത B-PER\nവന്നു O\n", encoding="utf-8")
    task = TokenClassification()
    plan, problems = plan_of_rows(
        read_recipe(["--train_file", str(path), "--output_dir", "out"], task.arguments()), task
    )
    rows = read_rows(plan, task, problems)
    with refused("unknown-tokens", "100%"):
        task.tokenise(plan, rows)
