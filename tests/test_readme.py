"""What the documents tell a newcomer to type and to open is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_cases import SUITES
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments
from indictune.config.command_arguments import CheckpointArguments, EvaluateArguments, MergeArguments
from indictune.config.recipe import read_recipe
from indictune.distributed.launch import read_deepspeed
from tests.conftest import FinishedRun
from tests.ranks.launching import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "recipes").rglob("*.yaml"))]
TRAINING: dict[str, tuple[type[Any], ...]] = {
    "scripts/train_sentiment.py": (ModelArguments, DataArguments, SentimentTrainingArguments),
    "scripts/train_llama.py": (LlamaModelArguments, ChatDataArguments, LlamaTrainingArguments),
}
VERBS: dict[str, tuple[type[Any], ...]] = {
    "prepare": TRAINING["scripts/train_sentiment.py"],
    "evaluate": (EvaluateArguments,),
    "merge": (MergeArguments,),
    "checkpoint": (CheckpointArguments,),
}
TOP_LEVEL = r"(?:indictune|scripts|accelerate_configs|ds_configs|recipes|benchmarks|docs|tests)/[\w./-]*\w"


def commands(text: str) -> list[list[str]]:
    """The words of every command in the bash blocks of a text."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def recipe_commands() -> list[list[str]]:
    """The commands in the headers of the recipes."""
    found = []
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        header = "\n".join(line[1:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        lines = header.replace("\\\n", " ").splitlines()
        found += [shlex.split(line) for line in lines if "scripts/" in line and "..." not in line]
    return found


README_COMMANDS, RECIPE_COMMANDS = commands(README), recipe_commands()


def test_the_commands_are_found() -> None:
    starts = {words[0] for words in README_COMMANDS}
    assert starts == {"make", "accelerate", "torchrun", "deepspeed", "python", "indictune"}
    assert len(RECIPE_COMMANDS) == len(list((ROOT / "recipes").rglob("*.yaml")))


@pytest.mark.parametrize("words", README_COMMANDS + RECIPE_COMMANDS, ids=" ".join)
def test_a_command_would_be_understood(words: list[str]) -> None:
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return
    if words[0] == "indictune":
        flags = words[2:] if words[2].startswith("--") else words[3:]  # merge and checkpoint take a bare word
        flags = [str(ROOT / flag) if flag.startswith("recipes/") else flag for flag in flags]
        assert read_recipe(flags, VERBS[words[1]]).problems == []
        return
    script = next(index for index, word in enumerate(words) if word.startswith("scripts/"))
    flags = words[script + 1 :]
    flags = [str(ROOT / flag) if flag.startswith("recipes/") else flag for flag in flags]
    recipe = read_recipe(flags, TRAINING[words[script]])
    assert recipe.problems == []
    if "deepspeed" in recipe.values:
        read_deepspeed(str(ROOT / recipe.values["deepspeed"]))
    if words[0] == "accelerate":
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_path_that_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    paths = set(re.findall(rf"(?<![\w/.-]){TOP_LEVEL}", text)) | set(re.findall(r"\]\(([\w./-]+)\)", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_tests_that_the_scoreboard_counts_are_those_of_its_results() -> None:
    name = r"benchmarks/results/[\w-]*-faults-full-rows-11-12-14-15-16\.json"
    lines = [line for line in README.splitlines() if re.search(name, line)]
    (path,) = set(re.findall(name, README))
    found = json.loads((ROOT / path).read_text(encoding="utf-8"))["faults"]
    for row, line in zip(SUITES, lines, strict=True):
        counts = [found[row]["ours"][title] for title in SUITES[row]]
        passed, run = sum(each["passed"] for each in counts), sum(sum(each.values()) for each in counts)
        assert passed == run
        assert re.search(rf"(?<!\d){passed} of {run} tests", line)


def test_every_strategy_file_is_in_the_table() -> None:
    shipped = {
        f"{folder}/{path.name}"
        for folder in ("accelerate_configs", "ds_configs")
        for path in (ROOT / folder).iterdir()
    }
    assert shipped <= set(re.findall(TOP_LEVEL, README))


def test_the_python_of_the_readme_runs(finished_run: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    block = block.replace('"outputs/demo"', repr(str(finished_run.folder)))
    for times in (1, 200):  # the model has 512 positions
        text, *others = re.findall(r'"(क्या[^"]*)"', block)
        assert others == []
        exec(block.replace(text, text * times), {})
        assert re.search(r"'label': '(negative|neutral|positive)'", capsys.readouterr().out)
