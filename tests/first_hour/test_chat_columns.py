"""No content of a conversation is dropped in silence: columns are used, renamed, refused or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indictune.commands.evaluate_file import FROM_TRAINING
from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.recipe import read_recipe
from indictune.config.shared_arguments import BadRowArguments
from indictune.data.chat.conversations import evaluated_file, load_conversations
from indictune.data.chat.messages import parse_columns
from tests.data.chats import load
from tests.problems import problems_raised
from tests.refusals import refused

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*rows: Row) -> str:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path("chats.jsonl").write_text(text, encoding="utf-8")
    return "chats.jsonl"


def texts_of(*rows: Row, columns: str | None = None) -> list[list[str]]:
    """The texts of the messages of each row."""
    table = load(ChatDataArguments(train_file=write(*rows), columns=columns)).rows["train"].table
    return [[message["content"] for message in messages] for messages in table["messages"].to_pylist()]


def notes_of(*rows: Row, columns: str | None = None) -> str:
    return "\n".join(load(ChatDataArguments(train_file=write(*rows), columns=columns)).notes)


def test_the_passage_and_the_response_of_dolly_are_learned() -> None:
    row = {"instruction": "किसने लिखा?", "context": "गोदान प्रेमचंद ने लिखा।", "category": "closed_qa"}
    for answer in ("response", "output"):
        assert texts_of(row | {answer: "प्रेमचंद"}) == [["किसने लिखा?\n\nगोदान प्रेमचंद ने लिखा।", "प्रेमचंद"]]


def test_each_instance_of_an_instruction_is_a_row() -> None:
    instances = [{"input": "रात", "output": "दिन"}, {"input": "", "output": "b"}]
    assert texts_of({"instruction": "opposite", "instances": instances, "id": "7"}) == [
        ["opposite\n\nरात", "दिन"],
        ["opposite", "b"],
    ]


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "a", "completion": "b", "history": [["c", "d"]]}, "history"),
        ({"prompt": "a", "completion": "b", "context": "x"}, "context"),
        ({"instruction": "a", "output": "b", "options": ["x", "y"]}, "options"),
        ({"instruction": "a", "output": "b", "context": "x", "passage": "y"}, "passage"),
        ({"instruction": "a", "output": "b", "instances": "x"}, "instances"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "passage": "x"},
            "passage",
        ),
    ],
)
def test_content_that_a_form_does_not_use_is_one_problem_of_the_file(row: Row, key: str) -> None:
    empty = {name: value for name, value in row.items() if name != key} | {key: None}
    args = ChatDataArguments(train_file=write(empty, *[row] * 20), bad_rows="quarantine", max_bad_fraction=0.99)
    assert problems_raised(lambda: load(args)) == ["--train_file chats.jsonl:2 content-ignored"]
    with refused("content-ignored", f" {key}, ", "20"):
        load(args)


def test_a_second_passage_is_named_with_the_first() -> None:
    with refused("content-ignored", "context, and input too"):
        texts_of({"instruction": "a", "output": "b", "input": "x", "context": "y"})


def test_a_history_of_prompts_is_used_after_the_renaming_that_the_message_gives() -> None:
    row = {"prompt": "e", "completion": "f", "history": [["a", "b"], ["c", "d"]]}
    with refused("content-ignored", "--columns instruction=prompt,output=completion,"):
        texts_of(row)
    assert texts_of(row, columns="instruction=prompt,output=completion") == [["a", "b", "c", "d", "e", "f"]]


@pytest.mark.parametrize(
    ("row", "renaming"),
    [
        ({"question": "a", "answer": "b", "id": "7"}, "instruction=question,output=answer"),
        ({"Instruction": "a", "Response": "b"}, "instruction=Instruction,output=Response"),
        ({"instruction": "a", "answer": "b"}, "output=answer"),
        ({"prompt": "a", "response": "b"}, "instruction=prompt,output=response"),
        (
            {"dialogue": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "messages=dialogue",
        ),
        ({"id": "7", "eng_Latn": [["a", "b"]], "num_turns": 1}, "interactions=eng_Latn"),
    ],
)
def test_missing_columns_are_one_problem_of_the_file_with_the_renaming_that_cures_it(row: Row, renaming: str) -> None:
    rows = [row] * 50
    assert problems_raised(lambda: texts_of(*rows)) == ["--train_file chats.jsonl form-unknown"]
    with refused("form-unknown", f"--columns {renaming} ["):
        texts_of(*rows)
    assert texts_of(*rows, columns=renaming) == [["a", "b"]] * 50


def test_each_of_several_files_needs_the_columns() -> None:
    for name, row in {"a": {"instruction": "a", "output": "b"}, "b": {"q": "a"}, "c": {"z": "a"}}.items():
        Path(f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    assert problems_raised(lambda: load(ChatDataArguments(train_file=["a.jsonl", "b.jsonl", "c.jsonl"]))) == [
        "--train_file b.jsonl form-unknown",
        "--train_file c.jsonl form-unknown",
    ]


def test_a_column_without_a_usual_name_is_left_to_the_user() -> None:
    with refused("form-unknown", "s1, s2", "--columns instruction=NAME,output=NAME"):
        texts_of({"s1": "a", "s2": "b"})


def test_raw_text_is_recognised_and_refused() -> None:
    rows = [{"text": "एक पाठ", "source": "web"}] * 50
    assert problems_raised(lambda: texts_of(*rows)) == ["--train_file chats.jsonl rows-of-raw-text"]
    with refused("rows-of-raw-text", "text, source", "--columns instruction=NAME,output=NAME"):
        texts_of(*rows)


def test_of_two_answers_none_is_dropped_unseen() -> None:
    row = {"prompt": "a", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c", "score_chosen": 8.5}
    with refused("rows-of-pairs", "indictune train dpo", "--columns messages=chosen"):
        texts_of(row)
    assert texts_of(row | {"rejected": None}) == [["a", "b"]]


def test_one_row_without_a_form_is_a_bad_row() -> None:
    good, bad = {"instruction": "a", "output": "b"}, {"question": "a"}
    assert problems_raised(lambda: texts_of(bad, good)) == ["--train_file chats.jsonl:1 unknown-form"]


def test_every_unused_column_is_named_once_with_its_share() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "score": "3"}]
    rows: list[Row] = [{"messages": messages, "id": "1", "source": None}, {"messages": messages, "id": "2"}]
    notes = notes_of(*rows, {"messages": messages, "source": "web"}, {"messages": messages})
    assert notes.count("chats.jsonl") == 1
    for part in ("id 50.0%", "source 25.0%", "messages.score 100.0%"):
        assert part in notes
    assert notes_of({"messages": [*messages[:1], {"role": "assistant", "content": "b"}], "tags": []}) == ""


def test_a_column_whose_name_another_takes_is_named() -> None:
    row = {"instruction": "style", "question": "a", "output": "b"}
    assert texts_of(row, columns="instruction=question") == [["a", "b"]]
    assert "instruction (replaced) 100.0%" in notes_of(row, columns="instruction=question")


def test_another_renaming_reads_the_file_again() -> None:
    row = {"q1": "a", "q2": "c", "output": "b"}
    assert texts_of(row, columns="instruction=q1") == [["a", "b"]]
    assert texts_of(row, columns="instruction=q2") == [["c", "b"]]


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ("instruction", "columns-malformed"),
        ("instruction=", "columns-malformed"),
        ("{question", "columns-malformed"),
        ('{"instruction": ["a"]}', "columns-malformed"),
        ("question=instruction", "columns-unknown"),
        ("instruction=question,output=no such", "columns-missing"),
    ],
)
def test_a_wrong_renaming_is_refused(columns: str, code: str) -> None:
    with refused(code, flag="--columns"):
        texts_of({"question": "a", "answer": "b"}, columns=columns)


def test_a_recipe_may_map_columns_and_evaluation_reads_them_as_training_did() -> None:
    Path("r.yaml").write_text("columns: {instruction: question, output: answer}\n")
    recipe = read_recipe(["--config", "r.yaml"], (ChatDataArguments,))
    assert parse_columns(recipe.values["columns"]) == {"instruction": "question", "output": "answer"}
    assert "columns" in FROM_TRAINING
    source = evaluated_file(write({"question": "a", "answer": "b"}), recipe.values["columns"])
    assert len(load_conversations(source, BadRowArguments()).rows["test"]) == 1
