"""Messages: every form of a row becomes the same messages, and what is wrong with a row is said."""

from __future__ import annotations

from typing import Any

import pytest

from indictune.data.messages import PROMPT_TEXTS, RowError, form_of, messages_of

Row = dict[str, Any]


def turns(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant by turns."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def read(row: Row) -> list[dict[str, str]]:
    return messages_of(row, form_of(row))


def error_of(row: Row) -> RowError:
    with pytest.raises(RowError) as raised:
        read(row)
    return raised.value


SYSTEM = {"role": "system", "content": "be brief"}
HELLO = turns("नमस्ते", "नमस्कार")


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"messages": HELLO, "id": "7", "tools": []}, "messages", HELLO),
        ({"messages": [SYSTEM, *turns("a", "b", "c", "d")]}, "messages", [SYSTEM, *turns("a", "b", "c", "d")]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "conversations",
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
            "conversations",
            [SYSTEM, *turns("a", "b", "c", "d")],
        ),
        ({"conversations": HELLO}, "conversations", HELLO),
        (
            {"conversations": [{"from": None, "value": None, **message} for message in HELLO]},
            "conversations",
            HELLO,
        ),
        (
            {"conversations": [{"role": None, "content": None, "from": "human", "value": "a"}, HELLO[1]]},
            "conversations",
            turns("a", "नमस्कार"),
        ),
        ({"prompt": "a", "completion": " b"}, "prompt and completion as texts", turns("a", " b")),
        (
            {"prompt": [SYSTEM, *turns("a", "b", "c")], "completion": [{"role": "assistant", "content": "d"}]},
            "prompt and completion as lists of messages",
            [SYSTEM, *turns("a", "b", "c", "d")],
        ),
        ({"instruction": "a", "output": "b"}, "instruction and output", turns("a", "b")),
        ({"instruction": "a", "input": "x\ny", "output": "b"}, "instruction and output", turns("a\n\nx\ny", "b")),
        ({"instruction": "a", "input": " \n", "output": "b"}, "instruction and output", turns("a", "b")),
        ({"instruction": "", "input": "x", "output": "b"}, "instruction and output", turns("x", "b")),
        (
            {
                "instruction": "e",
                "input": None,
                "output": "f",
                "system": "be brief",
                "history": [["a", "b"], ["c", "d"]],
            },
            "instruction and output",
            [SYSTEM, *turns("a", "b", "c", "d", "e", "f")],
        ),
        (
            {"instruction": "a", "output": "b", "system": " ", "history": []},
            "instruction and output",
            turns("a", "b"),
        ),
        ({"messages": HELLO, "system": "be brief"}, "messages", [SYSTEM, *HELLO]),
        (
            {"messages": [{"role": "system", "content": ""}, *HELLO], "system": "be brief"},
            "messages",
            [SYSTEM, *HELLO],
        ),
        ({"messages": [SYSTEM, *HELLO], "system": " "}, "messages", [SYSTEM, *HELLO]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "be brief"},
            "conversations",
            [SYSTEM, *turns("a", "b")],
        ),
        (
            {"prompt": HELLO[:1], "completion": HELLO[1:], "system": "be brief", "label": True},
            "prompt and completion as lists of messages",
            [SYSTEM, *HELLO],
        ),
        ({"prompt": "a", "completion": "b", "label": "1", "kto_tag": 1, "system": ""}, PROMPT_TEXTS, turns("a", "b")),
        ({"prompt": "a", "completion": "b", "label": None, "kto_tag": "good"}, PROMPT_TEXTS, turns("a", "b")),
        ({"messages": HELLO, "label": "0"}, "messages", HELLO),
        ({"instruction": "a", "output": "b", "label": 0}, "instruction and output", turns("a", "b")),
        ({"messages": HELLO, "weight": 1.0, "kto_tag": True, "reasoning": "on"}, "messages", HELLO),
        (
            {"messages": [{**HELLO[0], "weight": "0"}, {**HELLO[1], "weight": "1", "tool_calls": []}]},
            "messages",
            HELLO,
        ),
        (
            {
                "messages": [
                    {**HELLO[0], "train": False, "thinking": None},
                    {**HELLO[1], "train": True, "loss": None, "reasoning_content": " \n", "reasoning_details": []},
                ]
            },
            "messages",
            HELLO,
        ),
    ],
)
def test_every_form_becomes_messages(row: Row, form: str, messages: list[dict[str, str]]) -> None:
    assert form_of(row) == form
    assert messages_of(row, form) == messages


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": HELLO, "prompt": "a", "prompt_id": "7"}, "messages"),
        ({"messages": HELLO, "conversations": None, "instruction": None, "completion": None}, "messages"),
        ({"instruction": "a", "output": "b", "prompt": "### a"}, "instruction and output"),
        ({"completion": "b"}, "prompt and completion as texts"),
        ({"messages": None}, "messages"),
    ],
)
def test_a_key_without_a_value_counts_as_absent(row: Row, form: str) -> None:
    assert form_of(row) == form


def test_texts_stay_as_they_are() -> None:
    assert read({"prompt": " a\n", "completion": "\tb\u200b e\u0301 "}) == turns(" a\n", "\tb\u200b e\u0301 ")
    assert read({"messages": turns("  a ", "\n b")}) == turns("  a ", "\n b")
    assert read({"instruction": " a ", "input": " x ", "output": " b "}) == turns(" a \n\n x ", " b ")


def test_halves_of_surrogate_pairs_are_replaced_in_every_form() -> None:
    half, whole = "a\ud83d", "a\ufffd"
    part = {"type": "text", "text": half}
    rows: list[Row] = [
        {"messages": turns(half, half)},
        {"messages": [{"role": "user", "content": [part]}, {"role": "assistant", "content": half}]},
        {"prompt": half, "completion": half},
        {"instruction": half, "output": half},
    ]
    for row in rows:
        assert read(row) == turns(whole, whole)
    assert read({"instruction": "b", "output": "c", "history": [[half, half]]})[:2] == turns(whole, whole)


@pytest.mark.parametrize("key", ["text", "value", "content"])
def test_typed_parts_are_joined(key: str) -> None:
    parts = [{"type": "text", key: "a ", "index": None}, {"type": "text", key: "b"}]
    assert read({"messages": [{"role": "user", "content": parts}, *turns("a", "c")[1:]]}) == turns("a b", "c")


def test_a_system_message_without_text_is_left_out() -> None:
    assert read({"messages": [{"role": "system", "content": " "}, *HELLO]}) == HELLO


USER, ASSISTANT = turns("a", "b")


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (
            {"messages": [USER]},
            "answer-not-last",
        ),
        ({"messages": [SYSTEM]}, "answer-not-last"),
        ({"messages": turns("a", " \n")}, "no-answer"),
        ({"messages": turns("a", "", "b", "c")}, "no-answer"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "no-answer"),
        ({"prompt": "a", "completion": ""}, "no-answer"),
        ({"prompt": "a", "completion": None}, "no-answer"),
        ({"prompt": "a"}, "no-key"),
        ({"prompt": [USER], "completion": []}, "no-answer"),
        ({"instruction": "a", "output": "\u3000"}, "no-answer"),
        (
            {"instruction": "a", "context": "x", "response": "b"},
            "no-key",
        ),
        ({"messages": turns(" ", "b")}, "no-prompt"),
        ({"prompt": "\t", "completion": "b"}, "no-prompt"),
        ({"prompt": [], "completion": [ASSISTANT]}, "no-prompt"),
        (
            {"instruction": "", "input": " ", "output": "b"},
            "no-prompt",
        ),
        ({"messages": []}, "no-messages"),
        ({"conversations": None}, "no-messages"),
        (
            {"messages": [ASSISTANT]},
            "wrong-order",
        ),
        ({"messages": [USER, USER, ASSISTANT]}, "wrong-order"),
        (
            {"messages": [USER, ASSISTANT, ASSISTANT]},
            "wrong-order",
        ),
        ({"messages": [SYSTEM, ASSISTANT]}, "wrong-order"),
        ({"messages": [SYSTEM, SYSTEM, USER]}, "wrong-order"),
        (
            {"messages": [USER, SYSTEM, ASSISTANT]},
            "wrong-order",
        ),
        (
            {"prompt": [USER, ASSISTANT], "completion": [USER, ASSISTANT]},
            "wrong-order",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "b"}]},
            "unknown-role",
        ),
        ({"messages": [{"role": "human", "content": "b"}]}, "unknown-role"),
        (
            {"conversations": [{"from": "function", "value": "b"}]},
            "unknown-role",
        ),
        (
            {"messages": [{"content": "b"}]},
            "value-of-wrong-type",
        ),
        (
            {"conversations": [{"value": "b"}]},
            "value-of-wrong-type",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
            "value-of-wrong-type",
        ),
        (
            {"messages": [{"role": "user", "content": {}}]},
            "value-of-wrong-type",
        ),
        (
            {"messages": ["a"]},
            "value-of-wrong-type",
        ),
        ({"messages": "a"}, "value-of-wrong-type"),
        (
            {"prompt": "a", "completion": [ASSISTANT]},
            "value-of-wrong-type",
        ),
        (
            {"prompt": "a", "completion": True},
            "value-of-wrong-type",
        ),
        (
            {"prompt": [USER], "completion": "b"},
            "value-of-wrong-type",
        ),
        ({"prompt": "a", "completion": 5}, "value-of-wrong-type"),
        (
            {"instruction": "a", "input": {}, "output": "b"},
            "value-of-wrong-type",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            "value-of-wrong-type",
        ),
        (
            {"instruction": "a", "output": "b", "history": "ab"},
            "value-of-wrong-type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "part-not-text",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "value-of-wrong-type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "value-of-wrong-type",
        ),
        (
            {"text": "a", "Messages": []},
            "unknown-form",
        ),
        ({}, "unknown-form"),
        (
            {"messages": None, "instruction": None},
            "unknown-form",
        ),
        (
            {"messages": [SYSTEM, *HELLO], "system": "be long"},
            "two-systems",
        ),
        (
            {"prompt": "a", "completion": "b", "system": "be brief"},
            "system-with-texts",
        ),
        ({"messages": HELLO, "system": ["be brief"]}, "value-of-wrong-type"),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "rejected-answer",
        ),
        ({"messages": HELLO, "label": False}, "rejected-answer"),
        (
            {"messages": [USER, {**ASSISTANT, "weight": "0"}]},
            "weighted-answer",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
            "weighted-answer",
        ),
        (
            {"prompt": [USER], "completion": [{**ASSISTANT, "content": None, "tool_calls": [{"id": "7"}]}]},
            "tool-calls",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]},
            "tool-calls",
        ),
        *(
            (
                {"messages": [USER, {**ASSISTANT, key: thoughts}]},
                "thoughts",
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
                "weighted-answer",
            )
            for key, weight in [
                ("train", False),
                ("training", "0"),
                ("trainable", False),
                ("train_on_turn", False),
                ("loss", "0.5"),
            ]
        ),
        (
            {"prompt": "a", "completion": "b", "tool_calls": [{"id": "7"}]},
            "tool-calls",
        ),
        ({"messages": HELLO, "kto_tag": False}, "rejected-answer"),
        *(
            ({**row, key: written}, "rejected-answer")
            for key, row in (
                ("label", {"prompt": "a", "completion": "b"}),
                ("label", {"prompt": HELLO[:1], "completion": HELLO[1:]}),
                ("kto_tag", {"messages": HELLO}),
                ("kto_tag", {"instruction": "a", "output": "b"}),
            )
            for written in (0, 0.0, "0", "0.0", "false", "False")
        ),
        (
            {"messages": HELLO, "weight": 0},
            "weighted-answer",
        ),
        *(
            (
                {**row, "reasoning": "2 and 2 make 4."},
                "thoughts",
            )
            for row in (
                {"prompt": "a", "completion": "b"},
                {"prompt": HELLO[:1], "completion": HELLO[1:]},
                {"instruction": "a", "output": "b"},
            )
        ),
        (
            {"messages": HELLO, "tools": [{"name": "f"}]},
            "tool-calls",
        ),
        (
            {"messages": HELLO, "functions": '[{"name": "f"}]'},
            "tool-calls",
        ),
        (
            {"messages": HELLO, "instruction": "a"},
            "two-forms",
        ),
        (
            {"prompt": "a", "completion": "b", "instruction": ""},
            "two-forms",
        ),
    ],
)
def test_an_unusable_row_has_a_code(row: Row, code: str) -> None:
    assert error_of(row).code == code


def test_what_a_row_holds_is_not_quoted_at_length() -> None:
    assert len(str(error_of({"secret " * 20: "a"}).details)) < 100
    assert len(str(error_of({"messages": [{"role": "secret " * 20, "content": "a"}]}).details)) < 200
    many = str(error_of({f"key{number}": "a" for number in range(100)}).details["keys"])
    assert many.count("key") == 20 + 1
