"""The shipped recipes: every key is one, and every header says how to run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.recipe_memory import candidate_of, with_memory
from indictune.config.arguments import (
    DataArguments,
    IndicTrainingArguments,
    ModelArguments,
    SentimentTrainingArguments,
    TaggedDataArguments,
)
from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments
from indictune.config.recipe import read_recipe

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))
TYPES = {
    "sentiment": (ModelArguments, DataArguments, SentimentTrainingArguments),
    "llama": (LlamaModelArguments, ChatDataArguments, LlamaTrainingArguments),
    "tokens": (ModelArguments, TaggedDataArguments, IndicTrainingArguments),
}
SCRIPT = {
    "sentiment": "scripts/train_sentiment.py",
    "llama": "scripts/train_llama.py",
    "tokens": "scripts/train_tokens.py",
}

every_recipe = pytest.mark.parametrize("path", RECIPES, ids=[f"{path.parent.name}/{path.name}" for path in RECIPES])


@every_recipe
def test_every_key_is_one_and_every_value_fits(path: Path) -> None:
    files = [] if "\ndataset_name: " in path.read_text(encoding="utf-8") else ["--train_file", "rows.jsonl"]
    recipe = read_recipe(["--config", str(path), "--output_dir", "out", *files], TYPES[path.parent.name])
    assert recipe.problems == []
    for arguments in TYPES[path.parent.name][:2]:
        recipe.build(arguments)


@every_recipe
def test_the_header_tells_command_hardware_and_itself(path: Path) -> None:
    header = path.read_text(encoding="utf-8").partition("\noutput_dir")[0].partition("\nmodel_name")[0]
    assert SCRIPT[path.parent.name] in header
    assert f"recipes/{path.parent.name}/{path.name}" in header
    assert re.search("^# Hardware: ", header, re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * ("70b" in path.name), id=f"{path.parent.name}/{path.name}")
        for path in RECIPES
    ],
)
def test_the_expected_memory_is_what_the_plan_says_and_fits_the_hardware(path: Path) -> None:
    text, candidate = path.read_text(encoding="utf-8"), candidate_of(path)
    assert with_memory(text, candidate) == text, "stale: type `python -m docs.generate`"
    assert candidate.memory is not None
    if hardware := re.search(r"^# Hardware:.*?(\d+) GB", text, re.MULTILINE):
        assert candidate.memory.total_bytes < int(hardware[1]) * 1e9
