"""Pairs of answers: every usual layout gives the same pair, and what is wrong with pairs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import PairArguments, RatedArguments
from indictune.data.bad_rows import BadRows
from indictune.data.chat import answer_pairs
from indictune.data.chat.chat_tokens import choose_template
from indictune.data.chat.conversations import chat_sources, load_conversations
from indictune.data.row_choice import Splits
from indictune.errors import Problems
from indictune.models.load import load_tokenizer
from tests.problems import problems_raised

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "g"), ("assistant", "b"))
)
PAIR = {"prompt": "q", "chosen": "g", "rejected": "b"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded_rated(*rows: dict[str, Any]) -> Splits[answer_pairs.Rated]:
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args, problems = RatedArguments(train_file="p.jsonl", validation_split=0), Problems()
    sources = chat_sources(args, problems, answer_pairs.Rated)
    return load_conversations(sources, args, problems, rows_type=answer_pairs.Rated)


def loaded(*rows: dict[str, Any], **flags: Any) -> Splits[answer_pairs.Pairs]:
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    args, problems = PairArguments(train_file="p.jsonl", validation_split=0, **flags), Problems()
    sources = chat_sources(args, problems, answer_pairs.Pairs)
    return load_conversations(sources, args, problems, rows_type=answer_pairs.Pairs)


ULTRA = {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD], "score_chosen": 8.0}
LAYOUTS = {
    "texts": PAIR,
    "a common beginning": {"chosen": "q g", "rejected": "q b"},
    "answers as messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback": {**ULTRA, "score_rejected": 5.5},
    "HH": {"chosen": "\n\nHuman: q\n\nAssistant: g", "rejected": "\n\nHuman: q\n\nAssistant: b"},
}


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_the_same_pair(row: dict[str, Any]) -> None:
    (read,) = loaded(row).rows["train"].table.to_pylist()
    assert [each["content"].strip() for each in read["messages"]] == ["q", "g"]
    assert read["rejected"].strip() == "b"
    assert read["margin"] == (2.5 if "score_rejected" in row else None)


def test_several_turns_and_a_system_message_are_the_prompt() -> None:
    before = [{"role": "system", "content": "s"}, USER, GOOD, USER]
    (read,) = loaded({"chosen": [*before, GOOD], "rejected": [*before, BAD]}).rows["train"].table.to_pylist()
    assert (read["messages"], read["rejected"]) == ([*before, GOOD], "b")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"messages": [USER, GOOD]}], "p.jsonl:1 rows-without-pairs"),
        ([PAIR, {"prompt": "q", "chosen": "g"}], "p.jsonl:2 answer-missing"),
        ([{"chosen": [USER, GOOD], "rejected": [GOOD, USER, BAD]}], "p.jsonl:1 wrong-order"),
        ([{"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}], "p.jsonl:1 prompts-differ"),
        ([PAIR | {"rejected": "g"}], "p.jsonl:1 answers-equal"),
        ([PAIR | {"score_chosen": 1, "score_rejected": 1}] * 2, "p.jsonl scores-equal"),
        ([PAIR | {"rejected": ""}], "p.jsonl:1 answer-missing"),
        ([{"chosen": "They are good.", "rejected": "This is bad."}], "p.jsonl:1 no-prompt"),
        ([{"question": "q", "chosen": "It is g", "rejected": "It is b"}], "p.jsonl:1 prompt-of-another-name"),
    ],
)
def test_what_is_no_pair_is_refused_by_name(rows: list[dict[str, Any]], problem: str) -> None:
    assert problems_raised(lambda: loaded(*rows)) == [f"--train_file {problem}"]


def test_pairs_of_the_training_that_are_held_out_the_other_way_round_are_found() -> None:
    Path("v.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "b", "rejected": "g"}) + "\n", encoding="utf-8")
    one_scored = PAIR | {"prompt": "r", "score_chosen": 1, "score_rejected": 1}
    found = loaded(PAIR, one_scored, validation_file="v.jsonl").findings
    assert [(each.name, each.count) for each in found] == [("swapped_pairs", 1), ("swapped_pairs", 1)]


def test_swapped_repeated_and_length_biased_pairs_are_found() -> None:
    swapped = {"prompt": "q", "chosen": "b", "rejected": "g"}
    long = [{"prompt": f"q{number}", "chosen": "a long one", "rejected": "b"} for number in range(5)]
    rated = {"score_chosen": 1, "score_rejected": 2}
    found = {each.name: each.count for each in loaded(PAIR, swapped, *long, long[0], long[1] | rated).findings}
    assert found == {"duplicate_rows": 2, "swapped_pairs": 2, "worse_scored": 1, "longer_chosen": 7}


def tokens(
    rows: Splits[Any],
    made_by: Any = answer_pairs.tokenised_pairs,
    schema: pa.Schema = answer_pairs.TOKENS,
    max_length: int = 64,
) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(ModelArguments("builtin:tiny-indic-llama"))
    template = choose_template(tokenizer, None, as_written=False, train_on_prompts=False)
    table, bad = rows.rows["train"].table, BadRows("p.jsonl")
    made = made_by(table.to_batches(), tokenizer, template, max_length, False, bad)
    read: list[dict[str, Any]] = pa.Table.from_batches(made, schema).to_pylist()
    for row in read:
        for name, labels in (("answers", row["labels"]), ("others", row.get("other_labels", []))):
            counted = [token for token in labels if token != -100]
            row[name] = str(tokenizer.decode(counted, skip_special_tokens=True)).split()
    return read


def test_only_the_last_answer_of_both_conversations_is_counted() -> None:
    before = [USER, {"role": "assistant", "content": "first"}, USER]
    good, bad = ({"role": "assistant", "content": text} for text in (" good one ", " bad one "))
    (row,) = tokens(loaded({"chosen": [*before, good], "rejected": [*before, bad]}))
    assert "".join(row["answers"]) == "goodonebadone"
    sides = [slice(row["chosen_length"]), slice(row["chosen_length"], None)]
    ids, labels = ([row[name][side] for side in sides] for name in ("input_ids", "labels"))
    begins = [next(place for place, label in enumerate(side) if label != -100) for side in labels]
    assert begins[0] == begins[1]
    assert ids[0][: begins[0]] == ids[1][: begins[0]]
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])


def test_answers_that_the_cut_takes_or_makes_equal_are_bad_rows() -> None:
    (whole,) = tokens(loaded(PAIR))
    answer_begins = next(place for place, label in enumerate(whole["labels"]) if label != -100)
    assert problems_raised(lambda: tokens(loaded(PAIR), max_length=answer_begins)) == ["p.jsonl:1 answers-cut-off"]
    alike = {"prompt": "q", "chosen": "g g g g", "rejected": "g g g b"}
    assert problems_raised(lambda: tokens(loaded(alike), max_length=answer_begins + 1)) == [
        "p.jsonl:1 answers-cut-off"
    ]


def chat(answer: str, mark: object, prompt: str = "q") -> dict[str, Any]:
    return {"messages": [USER | {"content": prompt}, GOOD | {"content": answer}], "label": mark}


@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_marked_answers_of_both_layouts_are_read(key: str) -> None:
    texts = [{"prompt": "q", "completion": text, key: mark} for text, mark in (("g", 1), ("b", "False"))]
    for rows in (texts, [{key: row["label"], "messages": row["messages"]} for row in (chat("g", True), chat("b", 0))]):
        read = loaded_rated(*rows)
        assert read.rows["train"].table["is_good"].to_pylist() == [True, False]
        assert not [note for note in read.notes if "does not use" in note]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([chat("g", True)] * 2, "p.jsonl marks-equal"),
        ([chat("g", False)] * 2, "p.jsonl marks-equal"),
        ([chat("g", True), chat("b", False), chat("c", "maybe")], "p.jsonl:3 mark-missing"),
        ([PAIR | {"label": True}], "p.jsonl:1 rows-of-pairs"),
        ([{"messages": [USER, GOOD]}], "p.jsonl:1 rows-without-marks"),
    ],
)
def test_what_is_not_marked_is_refused_by_name(rows: list[dict[str, Any]], problem: str) -> None:
    assert problems_raised(lambda: loaded_rated(*rows)) == [f"--train_file {problem}"]


def test_answers_that_are_marked_both_ways_are_found() -> None:
    found = loaded_rated(chat("g", True), chat("g", False), chat("b", False)).findings
    assert {each.name: each.count for each in found} == {"duplicate_rows": 1, "conflicting_marks": 2}


def test_a_marked_answer_has_one_to_another_prompt() -> None:
    rows = [("one", "q"), ("two", "q"), ("three", "r"), ("four", "r"), ("five", "s")]
    split = loaded_rated(*(chat(text, text != "two", prompt) for text, prompt in rows))
    made = tokens(split, answer_pairs.tokenised_rated, answer_pairs.RATED_TOKENS)
    pairs = ["onethree", "twothree", "threetwo", "fourtwo", "fivefour"]
    assert ["".join(row["answers"] + row["others"]) for row in made] == pairs
    assert all(row["length"] == len(row["input_ids"]) == len(row["labels"]) for row in made)
    assert [row["is_good"] for row in made] == [1, 0, 1, 1, 1]
