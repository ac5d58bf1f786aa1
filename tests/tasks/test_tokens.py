"""Tagged sentences are read strictly, and tags stand at the first token of each word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indictune.config.recipe import read_recipe
from indictune.errors import UserError
from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.tokens import TaggedRows, TokenClassification
from tests.plans import codes

CONLL = "-DOCSTART- -X- O\n\nSita NNP B-PER\nलिखती VB O\n\n\nRavi NNP B-PER\n"
TASK = TokenClassification()


def rows_of(*argv: str) -> TaggedRows:
    plan, problems = plan_of_rows(read_recipe(["--output_dir", "out", *argv], TASK.arguments()), TASK)
    return read_rows(plan, TASK, problems)


def refused(*argv: str) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as raised:
        rows_of(*argv)
    return codes(raised.value.problems)


def test_conll_and_json_lines_hold_the_same_sentences(tmp_path: Path) -> None:
    conll, lines = tmp_path / "t.conll", tmp_path / "t.jsonl"
    conll.write_text(CONLL, encoding="utf-8")
    rows = [{"tokens": ["Sita", "लिखती"], "ner": ["B-PER", "O"]}, {"tokens": ["Ravi"], "ner": ["B-PER"]}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = rows_of("--train_file", str(conll))
    assert found.splits["train"] == [
        (f"{conll}:3", ["Sita", "लिखती"], ["B-PER", "O"]),
        (f"{conll}:7", ["Ravi"], ["B-PER"]),
    ]
    assert found.tags == ["B-PER", "O"]
    same = rows_of("--train_file", str(lines), "--text_column", "tokens", "--label_column", "ner")
    assert [each[1:] for each in same.splits["train"]] == [each[1:] for each in found.splits["train"]]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("Sita B-PER\nRavi\n", "tags-do-not-match"),
        ("", "tags-do-not-match"),
        ('{"text": ["Sita"], "label": []}', "tags-do-not-match"),
        ('{"text": ["Sita"]}', "unreadable"),
        ("{", "unreadable"),
    ],
)
def test_a_file_with_a_word_without_a_tag_is_refused(tmp_path: Path, content: str, code: str) -> None:
    path = tmp_path / ("t.jsonl" if content.startswith("{") else "t.conll")
    path.write_text(content, encoding="utf-8")
    assert refused("--train_file", str(path)) == [(code, "--train_file")]


def test_a_tag_that_training_lacks_is_named_with_its_place(tmp_path: Path) -> None:
    for name, content in (("t", "a B-PER\n"), ("v", "b O\n\nc B-LOC\n")):
        (tmp_path / f"{name}.conll").write_text(content, encoding="utf-8")
    train, validation = (str(tmp_path / f"{name}.conll") for name in "tv")
    found = refused("--train_file", train, "--validation_file", validation)
    assert found == [("tag-unseen", f"{validation}:1"), ("tag-unseen", f"{validation}:3")]


def test_what_the_task_does_not_do_is_refused(tmp_path: Path) -> None:
    recipe = read_recipe(["--dataset_name", "builtin:tweets", "--method", "lora"], TASK.arguments())
    plan, _ = plan_of_rows(recipe, TASK)
    assert codes(preflight(plan, TASK)) == [("not-of-this-task", "--method"), ("not-of-this-task", "--dataset_name")]


def test_the_first_token_of_a_word_carries_its_tag(tmp_path: Path) -> None:
    (tmp_path / "t.conll").write_text("Thiruvananthapuram B-LOC\nhai O\n", encoding="utf-8")
    recipe = read_recipe(["--train_file", str(tmp_path / "t.conll"), "--max_length", "64"], TASK.arguments())
    plan, problems = plan_of_rows(recipe, TASK)
    (row,) = TASK.tokenise(plan, read_rows(plan, TASK, problems)).train
    tags = [tag for tag in row["labels"] if tag != -100]
    assert len(row["labels"]) == len(row["input_ids"]) == row["length"] > 4
    assert (tags, row["labels"][1], row["labels"][0], row["labels"][-1]) == ([0, 1], 0, -100, -100)
    assert row["language"] == "romanised"
