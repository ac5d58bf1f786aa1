"""Holding out validation rows: proportions, equal texts, seeds, and every kind of rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.recipe import read_recipe
from indictune.data.chat.conversations import chat_sources as chats_of
from indictune.data.chat.conversations import load_conversations
from indictune.data.load_rows import Splits, load_splits
from indictune.data.row_choice import ValidationSplit, split_of
from indictune.errors import Problems
from indictune.preflight.checks import read_rows
from indictune.preflight.values import plan_of_rows
from indictune.tasks.tokens import TokenClassification
from tests.problems import problems_raised

TENTH = ValidationSplit(0.1, 42)


def chosen(
    split: ValidationSplit, texts: Sequence[str], strata: Sequence[str], labels: Sequence[Sequence[str]]
) -> set[int]:
    lists = pa.array(labels, pa.list_(pa.string())) if labels else None
    return set(np.flatnonzero(split.choose(texts, pa.array(strata), lists)).tolist())


def test_labels_and_languages_keep_their_proportions() -> None:
    strata = ["hi a"] * 500 + ["hi b"] * 300 + ["ta a"] * 150 + ["ta b"] * 50
    held_out = chosen(TENTH, [f"text {row}" for row in range(1000)], strata, [])
    assert Counter(strata[row] for row in held_out) == {"hi a": 50, "hi b": 30, "ta a": 15, "ta b": 5}


def test_the_choice_depends_on_the_seed_and_on_the_texts_and_not_on_their_order() -> None:
    texts = [f"text {row}" for row in range(200)]
    first = {texts[row] for row in chosen(TENTH, texts, ["x"] * 200, [])}
    backwards = texts[::-1]
    assert {backwards[row] for row in chosen(TENTH, backwards, ["x"] * 200, [])} == first
    other = chosen(ValidationSplit(0.1, 43), texts, ["x"] * 200, [])
    assert len(other) == len(first) == 20
    assert {texts[row] for row in other} != first


def test_rows_with_one_text_stay_together_and_a_frequent_one_is_trained_on() -> None:
    texts = ["good morning"] * 300 + [f"text {row // 3}" for row in range(700)]
    held_out = {texts[row] for row in chosen(TENTH, texts, ["x"] * 1000, [])}
    trained = {text for row, text in enumerate(texts) if row not in chosen(TENTH, texts, ["x"] * 1000, [])}
    assert "good morning" in trained
    assert 30 <= len(held_out) <= 36
    assert not held_out & trained


@pytest.mark.parametrize("seed", range(20))
def test_a_row_of_every_label_is_trained_on(seed: int) -> None:
    labels = [["rare"], ["a", "rarer"], *[["a"], ["b"]] * 9]
    held_out = chosen(ValidationSplit(0.5, seed), [str(row) for row in range(20)], ["x"] * 20, labels)
    assert len(held_out) == 10
    assert not held_out & {0, 1}


@pytest.mark.parametrize("rows", [1, 4])
def test_of_too_few_rows_none_is_held_out(rows: int) -> None:
    assert chosen(TENTH, [str(row) for row in range(rows)], ["x"] * rows, [["a"]] * rows) == set()


def load(split: ValidationSplit | None, **arguments: object) -> Splits:
    return load_splits(DataArguments(**arguments), validation_split=split)  # type: ignore[arg-type]


@pytest.fixture
def tweets(tmp_path: Path) -> str:
    """Lines 1 and 2, 3 and 4, ... differ only in what cleaning removes."""
    rows = [{"text": f"tweet {row}{end}", "label": "ab"[row % 2]} for row in range(50) for end in ("", " \u200b")]
    path = tmp_path / "tweets.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_labelled_texts_are_divided_after_cleaning(tweets: str) -> None:
    splits = load(TENTH, train_file=tweets)
    tables = {split: rows.table.to_pydict() for split, rows in splits.rows.items()}
    assert {split: len(table["text"]) for split, table in tables.items()} == {"train": 90, "validation": 10}
    assert not {*tables["train"]["text"]} & {*tables["validation"]["text"]}
    assert sorted(tables["train"]["line"] + tables["validation"]["line"]) == [*range(1, 101)]
    assert tables["train"]["line"] == sorted(tables["train"]["line"])
    held_out = splits.rows["validation"]
    assert held_out.location(0) == f"{tweets}:{tables['validation']['line'][0]}"


def test_another_share_or_seed_is_another_entry_of_the_cache(tweets: str) -> None:
    splits = [TENTH, ValidationSplit(0.1, 43), ValidationSplit(0.2, 42), None]
    assert len({load(split, train_file=tweets).folder for split in splits}) == 4
    assert load(TENTH, train_file=tweets).folder == load(TENTH, train_file=tweets).folder


@pytest.mark.parametrize(("kind", "label"), [("regression", "{}.5"), ("multi_label_classification", "a|{}")])
def test_scores_and_several_labels_are_divided_too(tmp_path: Path, kind: str, label: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"t{row},{label.format(row % 40)}\n" for row in range(200)))
    rows = load(TENTH, train_file=str(path), problem_type=kind).rows
    assert {split: len(each) for split, each in rows.items()} == {"train": 180, "validation": 20}


def test_validation_rows_of_the_dataset_are_used_and_a_given_share_is_ignored() -> None:
    assert load(TENTH, dataset_name="builtin:tweets").notes == []
    splits = load(ValidationSplit(0.3, 42), dataset_name="builtin:tweets")
    assert len(splits.rows["validation"]) == 252
    assert [note for note in splits.notes if "--validation_split 0.3" in note]


def test_conversations_are_divided_by_language(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"{word} {row}", "completion": "ok"} for word in ("कहो", "சொல்") for row in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 2), encoding="utf-8")
    args = ChatDataArguments(train_file=str(path))
    splits = load_conversations(chats_of(args, Problems()), args, validation_split=TENTH)
    held_out = splits.rows["validation"].table
    assert Counter(held_out["language"].to_pylist()) == {"hi": 10, "ta": 10}
    texts = [{str(chat) for chat in rows.table["messages"].to_pylist()} for rows in splits.rows.values()]
    assert not texts[0] & texts[1]


def test_sentences_are_divided_and_every_tag_is_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("Goa B-LOC\n\n" + "".join(f"Sita{row} B-PER\nआई O\n\n" for row in range(59)), encoding="utf-8")
    task = TokenClassification()
    plan, problems = plan_of_rows(
        read_recipe(["--train_file", str(path), "--output_dir", "out"], task.arguments()), task
    )
    assert split_of(plan) == TENTH
    rows = read_rows(plan, task, problems)
    assert {split: len(each) for split, each in rows.splits.items()} == {"train": 54, "validation": 6}
    assert rows.tags == ["B-LOC", "B-PER", "O"]
    assert rows.splits["validation"].tags().keys() == {"B-PER", "O"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, TENTH),
        ({"seed": "7"}, ValidationSplit(0.1, 7)),
        ({"seed": "7", "data_seed": "8", "validation_split": "0.2"}, ValidationSplit(0.2, 8)),
        ({"validation_split": "0"}, None),
        ({"validation_file": "v.conll"}, None),
        ({"validation_file": "v.conll", "validation_split": "0"}, None),
    ],
)
def test_the_flags_decide(given: dict[str, str], expected: ValidationSplit | None) -> None:
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    task = TokenClassification()
    plan, problems = plan_of_rows(
        read_recipe(["--train_file", "t.conll", "--output_dir", "out", *flags], task.arguments()), task
    )
    assert (split_of(plan), list(problems)) == (expected, [])


def test_a_share_that_cannot_be_is_refused() -> None:
    with_file = {"train_file": "t.csv", "validation_file": "v.csv", "validation_split": 0.2}
    assert problems_raised(lambda: DataArguments(**with_file)) == ["--validation_split 0.2 no-effect"]  # type: ignore[arg-type]
    assert problems_raised(lambda: DataArguments(train_file="t.csv", validation_split=1.0)) == [
        "--validation_split 1.0 share-expected"
    ]
