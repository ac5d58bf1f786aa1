"""The shipped recipes: every key is one, and every header says how to run it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from docs.recipe_memory import candidate_of, with_memory
from indictune.config.arguments import (
    DataArguments,
)
from indictune.config.command_line import SCRIPTS
from indictune.config.recipe import read_recipe
from indictune.tasks.all_tasks import TASKS

KNOWN = {field.name for field in dataclasses.fields(DataArguments)}
RECIPES = [
    path
    for path in sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))
    if "text_pair_column" in KNOWN or "text_pair_column" not in path.read_text(encoding="utf-8")
]
TYPES = {task.name: task.arguments for task in TASKS}


def task_of(path: Path) -> str:
    task: str = yaml.safe_load(path.read_text(encoding="utf-8"))["task"]
    return task


every_recipe = pytest.mark.parametrize("path", RECIPES, ids=[f"{path.parent.name}/{path.name}" for path in RECIPES])


@every_recipe
def test_every_key_is_one_and_every_value_fits(path: Path) -> None:
    names_rows = re.search("^(dataset_name|train_file): ", path.read_text(encoding="utf-8"), re.MULTILINE)
    files, types = ([] if names_rows else ["--train_file", "rows.jsonl"]), TYPES[task_of(path)]
    recipe = read_recipe(["--config", str(path), "--output_dir", "out", *files], types)
    assert recipe.problems == []
    for arguments in types[:2]:
        recipe.build(arguments)


@every_recipe
def test_the_header_tells_command_hardware_and_itself(path: Path) -> None:
    header = path.read_text(encoding="utf-8").partition("\noutput_dir")[0].partition("\nmodel_name")[0]
    assert SCRIPTS[task_of(path)] in header
    assert f"recipes/{path.parent.name}/{path.name}" in header
    assert re.search("^# Hardware: ", header, re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=pytest.mark.slow if "70b" in path.name else pytest.mark.more,
            id=f"{path.parent.name}/{path.name}",
        )
        for path in RECIPES
    ],
)
def test_the_expected_memory_is_what_the_plan_says_and_fits_the_hardware(path: Path) -> None:
    text, candidate = path.read_text(encoding="utf-8"), candidate_of(path)
    assert with_memory(text, candidate) == text, "stale: type `python -m docs.generate`"
    assert candidate.memory is not None
    if hardware := re.search(r"^# Hardware:.*?(\d+) GB", text, re.MULTILINE):
        assert candidate.memory.total_bytes < int(hardware[1]) * 1e9
