"""Messages: every form of a row becomes the same messages, and what is wrong with a row is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from indictune.data.chat.messages import RowError, is_prompt_text, messages_of
from tests.ranks.launching import ROOT

Row = dict[str, Any]


def turns(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def error_of(row: Row) -> RowError:
    with pytest.raises(RowError) as raised:
        messages_of(row)
    return raised.value


SYSTEM = {"role": "system", "content": "be brief"}
HELLO = turns("नमस्ते", "नमस्कार")


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": HELLO, "id": "7", "tools": []}, HELLO),
        ({"messages": [SYSTEM, *turns("a", "b", "c", "d")]}, [SYSTEM, *turns("a", "b", "c", "d")]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            turns("a", "b"),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "be brief"},
                    {"from": "user", "value": "a"},
                    {"from": "chatgpt", "value": "b"},
                    {"from": "human", "value": "c"},
                    {"from": "assistant", "value": "d"},
                ]
            },
            [SYSTEM, *turns("a", "b", "c", "d")],
        ),
        ({"conversations": HELLO}, HELLO),
        (
            {"conversations": [{"from": None, "value": None, **message} for message in HELLO]},
            HELLO,
        ),
        (
            {"conversations": [{"role": None, "content": None, "from": "human", "value": "a"}, HELLO[1]]},
            turns("a", "नमस्कार"),
        ),
        ({"prompt": "a", "completion": " b"}, turns("a", " b")),
        (
            {"prompt": [SYSTEM, *turns("a", "b", "c")], "completion": [{"role": "assistant", "content": "d"}]},
            [SYSTEM, *turns("a", "b", "c", "d")],
        ),
        ({"instruction": "a", "output": "b"}, turns("a", "b")),
        ({"instruction": "a", "input": "x\ny", "output": "b"}, turns("a\n\nx\ny", "b")),
        ({"instruction": "a", "input": " \n", "output": "b"}, turns("a", "b")),
        ({"instruction": "", "input": "x", "output": "b"}, turns("x", "b")),
        ({"instruction": "a", "context": "x", "response": "b"}, turns("a\n\nx", "b")),
        ({"instruction": "a", "input": "", "passage": "x", "output": "b"}, turns("a\n\nx", "b")),
        (
            {
                "instruction": "e",
                "input": None,
                "output": "f",
                "system": "be brief",
                "history": [["a", "b"], ["c", "d"]],
            },
            [SYSTEM, *turns("a", "b", "c", "d", "e", "f")],
        ),
        (
            {"instruction": "a", "output": "b", "system": " ", "history": []},
            turns("a", "b"),
        ),
        ({"messages": HELLO, "system": "be brief"}, [SYSTEM, *HELLO]),
        (
            {"messages": [{"role": "system", "content": ""}, *HELLO], "system": "be brief"},
            [SYSTEM, *HELLO],
        ),
        ({"messages": [SYSTEM, *HELLO], "system": " "}, [SYSTEM, *HELLO]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "be brief"},
            [SYSTEM, *turns("a", "b")],
        ),
        (
            {"prompt": HELLO[:1], "completion": HELLO[1:], "system": "be brief", "label": True},
            [SYSTEM, *HELLO],
        ),
        ({"prompt": "a", "completion": "b", "label": "1", "kto_tag": 1, "system": ""}, turns("a", "b")),
        ({"prompt": "a", "completion": "b", "label": None, "kto_tag": "good"}, turns("a", "b")),
        ({"messages": HELLO, "label": "1"}, HELLO),
        ({"instruction": "a", "output": "b", "label": 2}, turns("a", "b")),
        ({"messages": HELLO, "weight": 1.0, "kto_tag": True, "reasoning": "on"}, HELLO),
        (
            {"messages": [{**HELLO[0], "weight": "0"}, {**HELLO[1], "weight": "1", "tool_calls": []}]},
            HELLO,
        ),
        (
            {
                "messages": [
                    {**HELLO[0], "train": False, "thinking": None},
                    {**HELLO[1], "train": True, "loss": None, "reasoning_content": " \n", "reasoning_details": []},
                ]
            },
            HELLO,
        ),
        ({"interactions": [["a", "b"], ["c", "d"]], "system": "be brief"}, [SYSTEM, *turns("a", "b", "c", "d")]),
        ({"interactions": [["a", "b"], []], "label": 1}, turns("a", "b")),
        ({"prompt": "a", "chosen": " b", "rejected": "c", "label": 1}, turns("a", " b")),
        ({"prompt": "a", "chosen": turns("a", "b"), "rejected": turns("a", "c")}, turns("a", "b")),
        ({"prompt": "c", "chosen": turns("a", "b", "c", "d"), "rejected": []}, turns("a", "b", "c", "d")),
        ({"prompt": "a", "chosen": turns("a", "b")[1:], "system": "be brief"}, [SYSTEM, *turns("a", "b")]),
        ({"prompt": [SYSTEM, *turns("a")], "chosen": turns("a", "b")[1:]}, [SYSTEM, *turns("a", "b")]),
        ({"prompt": turns("a"), "chosen": [SYSTEM, *turns("a", "b")]}, [SYSTEM, *turns("a", "b")]),
        ({"chosen": turns("a", "b"), "rejected": turns("a", "c")}, turns("a", "b")),
        (
            {"prompt": "a", "chosen": turns("a", "b"), "messages": turns("a", "b"), "score_chosen": 8.5},
            turns("a", "b"),
        ),
    ],
)
def test_every_form_becomes_messages(row: Row, messages: list[dict[str, str]]) -> None:
    assert messages_of(row) == messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": HELLO, "prompt": "a", "prompt_id": "7"},
        {"messages": HELLO, "conversations": None, "instruction": "a", "completion": None},
        {"instruction": HELLO[0]["content"], "output": HELLO[1]["content"], "prompt": "### a"},
    ],
)
def test_a_form_needs_a_value_of_each_of_its_keys(row: Row) -> None:
    assert messages_of(row) == HELLO


def test_only_a_prompt_and_a_completion_without_messages_are_texts() -> None:
    assert is_prompt_text({"prompt": "a", "completion": "b"})
    assert is_prompt_text({"prompt": "a", "chosen": "b", "rejected": ["c"]})
    assert not is_prompt_text({"prompt": "a", "chosen": HELLO})
    assert not is_prompt_text({"interactions": [["a", "b"]]})
    assert not is_prompt_text({"prompt": HELLO[:1], "completion": HELLO[1:]})
    assert not is_prompt_text({"messages": HELLO})
    assert not is_prompt_text({"instruction": "a", "output": "b"})


def test_texts_stay_as_they_are() -> None:
    assert messages_of({"prompt": " a\n", "completion": "\tb\u200b e\u0301 "}) == turns(" a\n", "\tb\u200b e\u0301 ")
    assert messages_of({"messages": turns("  a ", "\n b")}) == turns("  a ", "\n b")
    assert messages_of({"instruction": " a ", "input": " x ", "output": " b "}) == turns(" a \n\n x ", " b ")


@pytest.mark.parametrize("key", ["text", "value"])
def test_typed_parts_are_joined(key: str) -> None:
    parts = [{"type": "text", key: "a ", "index": None}, {"type": "text", key: "b"}]
    assert messages_of({"messages": [{"role": "user", "content": parts}, *turns("a", "c")[1:]]}) == turns("a b", "c")


def test_a_system_message_without_text_is_left_out() -> None:
    assert messages_of({"messages": [{"role": "system", "content": " "}, *HELLO]}) == HELLO


USER, ASSISTANT = turns("a", "b")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"messages": [USER]}, "answer-not-last"),
        ({"messages": [SYSTEM]}, "answer-not-last"),
        ({"messages": turns("a", " \n")}, "no-answer"),
        ({"messages": turns("a", "", "b", "c")}, "no-answer"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "no-answer"),
        ({"prompt": "a", "completion": ""}, "no-answer"),
        ({"prompt": "a", "completion": None}, "unknown-form"),
        ({"prompt": "a"}, "unknown-form"),
        ({"prompt": [USER], "completion": []}, "answer-not-last"),
        ({"instruction": "a", "output": "\u3000"}, "no-answer"),
        ({"instruction": "a", "output": "b", "response": "c"}, "unknown-form"),
        ({"instruction": "a", "input": "x", "context": "y", "output": "b"}, "content-ignored"),
        ({"messages": turns(" ", "b")}, "no-prompt"),
        ({"prompt": "\t", "completion": "b"}, "no-prompt"),
        ({"prompt": [], "completion": [ASSISTANT]}, "wrong-order"),
        ({"instruction": "", "input": " ", "output": "b"}, "no-prompt"),
        ({"messages": []}, "answer-not-last"),
        ({"conversations": None}, "unknown-form"),
        ({"messages": [ASSISTANT]}, "wrong-order"),
        ({"messages": [USER, USER, ASSISTANT]}, "wrong-order"),
        ({"messages": [USER, ASSISTANT, ASSISTANT]}, "wrong-order"),
        ({"messages": [SYSTEM, ASSISTANT]}, "wrong-order"),
        ({"messages": [SYSTEM, SYSTEM, USER]}, "wrong-order"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, "wrong-order"),
        ({"messages": [USER, {"role": "tool", "content": "b"}]}, "unknown-role"),
        ({"conversations": [{"from": "function", "value": "b"}]}, "unknown-role"),
        ({"messages": [{"content": "b"}]}, "unknown-role"),
        ({"conversations": [{"value": "b"}]}, "unknown-role"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "value-of-wrong-type"),
        ({"messages": [{"role": "user", "content": {}}]}, "value-of-wrong-type"),
        ({"messages": ["a"]}, "value-of-wrong-type"),
        ({"messages": "a"}, "value-of-wrong-type"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "value-of-wrong-type"),
        ({"prompt": "a", "completion": True}, "value-of-wrong-type"),
        ({"prompt": [USER], "completion": "b"}, "value-of-wrong-type"),
        ({"prompt": "a", "completion": 5}, "value-of-wrong-type"),
        ({"instruction": "a", "input": {}, "output": "b"}, "value-of-wrong-type"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "value-of-wrong-type"),
        ({"instruction": "a", "output": "b", "history": "ab"}, "value-of-wrong-type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "value-of-wrong-type",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "value-of-wrong-type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "value-of-wrong-type"),
        ({"text": "a", "Messages": []}, "unknown-form"),
        ({}, "unknown-form"),
        ({"messages": None, "instruction": None}, "unknown-form"),
        ({"messages": [SYSTEM, *HELLO], "system": "be long"}, "wrong-order"),
        ({"prompt": "a", "completion": "b", "system": "be brief"}, "key-ignored"),
        ({"messages": HELLO, "system": ["be brief"]}, "value-of-wrong-type"),
        ({"prompt": "a", "completion": "b", "label": False}, "answer-rejected"),
        ({"messages": [USER, {**ASSISTANT, "weight": "0"}]}, "key-ignored"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, "key-ignored"),
        (
            {"prompt": [USER], "completion": [{**ASSISTANT, "content": None, "tool_calls": [{"id": "7"}]}]},
            "key-ignored",
        ),
        ({"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, "key-ignored"),
        *(
            (
                {"messages": [USER, {**ASSISTANT, key: thoughts}]},
                "key-ignored",
            )
            for key, thoughts in [
                ("reasoning_content", "2 and 2 make 4."),
                ("reasoning", "..."),
                ("reasoning_details", [{"type": "reasoning.text", "text": "..."}]),
                ("thinking", "..."),
            ]
        ),
        *(
            (
                {"messages": [USER, {**ASSISTANT, key: weight}]},
                "key-ignored",
            )
            for key, weight in [
                ("train", False),
                ("loss_weight", "0.0"),
                ("training", "0"),
                ("trainable", False),
                ("train_on_turn", False),
                ("loss", "0.5"),
            ]
        ),
        ({"prompt": "a", "completion": "b", "tool_calls": [{"id": "7"}]}, "key-ignored"),
        ({"messages": HELLO, "kto_tag": False}, "answer-rejected"),
        *(
            ({"messages": [USER, {**ASSISTANT, key: written}]}, "answer-rejected")
            for key in ("label", "kto_tag")
            for written in (False, 0, "0.0")
        ),
        ({"conversations": [USER, {**ASSISTANT, "label": False}]}, "answer-rejected"),
        ({"chosen": [USER, {**ASSISTANT, "kto_tag": False}]}, "answer-rejected"),
        *(
            ({"messages": HELLO, key: value}, "content-ignored")
            for key, value in (("images", ["kite.jpg"]), ("audio", "a.wav"), ("documents", [{"title": "notice"}]))
        ),
        *(
            ({**row, key: written}, "answer-rejected")
            for key, row in (
                ("label", {"prompt": "a", "completion": "b"}),
                ("label", {"prompt": HELLO[:1], "completion": HELLO[1:]}),
                ("label", {"messages": HELLO}),
                ("label", {"conversations": HELLO}),
                ("label", {"instruction": "a", "output": "b"}),
                ("label", {"interactions": [["a", "b"]]}),
                ("kto_tag", {"messages": HELLO}),
                ("kto_tag", {"instruction": "a", "output": "b"}),
            )
            for written in (0, 0.0, "0", "0.0", "false", "False")
        ),
        ({"messages": HELLO, "weight": 0}, "key-ignored"),
        *(
            (
                {**row, "reasoning": "2 and 2 make 4."},
                "key-ignored",
            )
            for row in (
                {"prompt": "a", "completion": "b"},
                {"prompt": HELLO[:1], "completion": HELLO[1:]},
                {"instruction": "a", "output": "b"},
            )
        ),
        ({"messages": HELLO, "tools": [{"name": "f"}]}, "key-ignored"),
        ({"messages": HELLO, "functions": '[{"name": "f"}]'}, "key-ignored"),
        ({"prompt": "a", "completion": "b", "messages": HELLO}, "unknown-form"),
        ({"interactions": []}, "answer-not-last"),
        ({"interactions": [["a", " "]]}, "no-answer"),
        *(({"interactions": held}, "value-of-wrong-type") for held in ("[['a']]", [["a"]], ["a", "b"], [["a", None]])),
        ({"interactions": [["a", "b"]], "messages": HELLO}, "unknown-form"),
        ({"interactions": [["a", "b"]], "context": "x"}, "content-ignored"),
        ({"prompt": "a", "rejected": "b"}, "unknown-form"),
        ({"prompt": "a", "completion": "b", "chosen": "c"}, "unknown-form"),
        ({"messages": HELLO, "chosen": turns("a", "b")}, "unknown-form"),
        ({"prompt": "x", "chosen": turns("a", "b")}, "content-ignored"),
        ({"chosen": "b", "rejected": "c"}, "no-prompt"),
        ({"prompt": [USER], "chosen": "b"}, "value-of-wrong-type"),
        ({"prompt": "a", "chosen": turns("a")}, "answer-not-last"),
        ({"prompt": "a", "chosen": "b", "reasoning": "2 and 2 make 4."}, "key-ignored"),
        ({"chosen": [USER, {**ASSISTANT, "weight": 0}]}, "key-ignored"),
        *(
            ({**row, key: False}, "answer-rejected")
            for row in ({"interactions": [["a", "b"]]}, {"prompt": "a", "chosen": "b"}, {"chosen": turns("a", "b")})
            for key in ("label", "kto_tag")
        ),
        ({"prompt": "a", "chosen": "b", "label": 0}, "answer-rejected"),
    ],
)
def test_an_unusable_row_has_a_code(row: Row, code: str) -> None:
    assert error_of(row).code == code


def test_what_a_row_holds_is_not_quoted_at_length() -> None:
    assert len(str(error_of({"secret " * 20: "a"}).details)) < 100
    assert len(str(error_of({"messages": [{"role": "secret " * 20, "content": "a"}]}).details)) < 200
    many = str(error_of({f"key{number}": "a" for number in range(100)}).details["keys"])
    assert many.count("key") == 20


def is_refused(line: str) -> bool:
    try:
        messages_of(json.loads(line))
    except RowError:
        return True
    return False


@pytest.mark.parametrize(
    ("name", "learned"),
    [("kto_messages", "true"), ("kto_alpaca", "true"), ("images", None), ("documents", None), ("chat_val", "")],
)
def test_of_a_file_only_answers_that_are_meant_are_learned(name: str, learned: str | None) -> None:
    lines = (ROOT / f"tests/inputs/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not is_refused(line)]
    assert kept == [line for line in lines if learned is not None and learned in line]
