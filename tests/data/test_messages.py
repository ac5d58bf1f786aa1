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
WRONG_TYPE, WRONG_ORDER = "a value of the wrong type", "roles out of order"


@pytest.mark.parametrize(
    ("row", "kind", "message"),
    [
        (
            {"messages": [USER]},
            "no answer",
            "the last message is of user; add one of assistant, or remove the row.",
        ),
        ({"messages": [SYSTEM]}, "no answer", "the last message is of system; add one of assistant"),
        ({"messages": turns("a", " \n")}, "no answer", "message 2, of assistant, is empty; give it a text"),
        ({"messages": turns("a", "", "b", "c")}, "no answer", "message 2, of assistant, is empty"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "no answer", "message 2, of assistant, is empty"),
        ({"prompt": "a", "completion": ""}, "no answer", "completion is empty; give it a text, or remove the row."),
        ({"prompt": "a", "completion": None}, "no answer", "completion is empty; "),
        ({"prompt": "a"}, "no answer", "there is no completion (it has the keys prompt); give it a text"),
        ({"prompt": [USER], "completion": []}, "no answer", "completion is empty; give it messages"),
        ({"instruction": "a", "output": "\u3000"}, "no answer", "output is empty; "),
        (
            {"instruction": "a", "context": "x", "response": "b"},
            "no answer",
            "there is no output (it has the keys context, instruction, response); ",
        ),
        ({"messages": turns(" ", "b")}, "an empty prompt", "message 1, of user, is empty; give it a text"),
        ({"prompt": "\t", "completion": "b"}, "an empty prompt", "prompt is empty; "),
        ({"prompt": [], "completion": [ASSISTANT]}, "an empty prompt", "prompt is empty; give it messages"),
        (
            {"instruction": "", "input": " ", "output": "b"},
            "an empty prompt",
            "instruction and input are empty; fill one of them, or remove the row.",
        ),
        ({"messages": []}, "no messages", "messages is empty; give it messages, or remove the row."),
        ({"conversations": None}, "no messages", "conversations is empty; "),
        (
            {"messages": [ASSISTANT]},
            WRONG_ORDER,
            "message 1 is of assistant, first; expected system or user.",
        ),
        ({"messages": [USER, USER, ASSISTANT]}, WRONG_ORDER, "message 2 is of user, after user; expected assistant."),
        (
            {"messages": [USER, ASSISTANT, ASSISTANT]},
            WRONG_ORDER,
            "message 3 is of assistant, after assistant; expected user.",
        ),
        ({"messages": [SYSTEM, ASSISTANT]}, WRONG_ORDER, "message 2 is of assistant, after system; expected user."),
        ({"messages": [SYSTEM, SYSTEM, USER]}, WRONG_ORDER, "message 2 is of system, after system; expected user."),
        (
            {"messages": [USER, SYSTEM, ASSISTANT]},
            WRONG_ORDER,
            "message 2 is of system, after user; expected assistant.",
        ),
        (
            {"prompt": [USER, ASSISTANT], "completion": [USER, ASSISTANT]},
            WRONG_ORDER,
            "completion begins with user; expected assistant.",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "b"}]},
            "an unknown role",
            "message 2 of messages is of tool; expected one of system, user, assistant. Rename it, or remove the row.",
        ),
        ({"messages": [{"role": "human", "content": "b"}]}, "an unknown role", "message 1 of messages is of human; "),
        (
            {"conversations": [{"from": "function", "value": "b"}]},
            "an unknown role",
            "message 1 of conversations is of function; expected one of system, user, assistant, human, gpt, chatgpt.",
        ),
        (
            {"messages": [{"content": "b"}]},
            WRONG_TYPE,
            "message 1 of messages: role holds null; expected {role, content}.",
        ),
        (
            {"conversations": [{"value": "b"}]},
            WRONG_TYPE,
            "message 1 of conversations: from holds null; expected {from, value}.",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
            WRONG_TYPE,
            "message 2 of messages: content holds null, expected text or a list of parts with text.",
        ),
        (
            {"messages": [{"role": "user", "content": {}}]},
            WRONG_TYPE,
            "message 1 of messages: content",
        ),
        (
            {"messages": ["a"]},
            WRONG_TYPE,
            "message 1 of messages is a text or a number, expected {ro",
        ),
        ({"messages": "a"}, WRONG_TYPE, "messages holds a text or a number, expected a list of mes"),
        (
            {"prompt": "a", "completion": [ASSISTANT]},
            WRONG_TYPE,
            "prompt holds a text or a number, ex",
        ),
        (
            {"prompt": "a", "completion": True},
            WRONG_TYPE,
            "completion holds a boolean, expected text.",
        ),
        (
            {"prompt": [USER], "completion": "b"},
            WRONG_TYPE,
            "completion holds a text or a number, expected a list of m",
        ),
        ({"prompt": "a", "completion": 5}, WRONG_TYPE, "completion holds int, expected text."),
        (
            {"instruction": "a", "input": {}, "output": "b"},
            WRONG_TYPE,
            "input holds an object, expec",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["a"]]},
            WRONG_TYPE,
            "history: expected a list of [user, assistant] pairs of texts.",
        ),
        (
            {"instruction": "a", "output": "b", "history": "ab"},
            WRONG_TYPE,
            "history: expected a list",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            WRONG_TYPE,
            "message 1 of messages: content, part 2 is of type image_url; only text is read. Remove the part or",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            WRONG_TYPE,
            'message 1 of messages: content, part 1 is a text or a number, expected {"type": "text", "text": ...}.',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            WRONG_TYPE,
            "message 1 of messages: content, part 1 has no text; expected it as text, value, content.",
        ),
        (
            {"text": "a", "Messages": []},
            "an unknown form",
            "it has the keys Messages, text; expected messages, or conversations, or prompt and completion, or "
            "instruction and output. Rename the keys.",
        ),
        ({}, "an unknown form", "it has no key with a value; expected messages, "),
        (
            {"messages": None, "instruction": None},
            "an unknown form",
            "it has no key with a value; expected messages, ",
        ),
        (
            {"messages": [SYSTEM, *HELLO], "system": "be long"},
            "two system messages",
            "has both system and a message of system; leave out one of them.",
        ),
        (
            {"prompt": "a", "completion": "b", "system": "be brief"},
            "system beside plain texts",
            "system has no place beside prompt and completion as texts; write it into prompt, or give messages.",
        ),
        ({"messages": HELLO, "system": ["be brief"]}, WRONG_TYPE, "system holds a list, expected text."),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "a rejected answer",
            "label is false, as of an answer that was rejected; remove the row, or the key.",
        ),
        ({"messages": HELLO, "label": False}, "a rejected answer", "label is false"),
        (
            {"messages": [USER, {**ASSISTANT, "weight": "0"}]},
            "an answer of another weight",
            "message 2 of messages has the weight 0, but every answer counts as 1; remove the row, or the key.",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
            "an answer of another weight",
            "message 2 of messages has ",
        ),
        (
            {"prompt": [USER], "completion": [{**ASSISTANT, "content": None, "tool_calls": [{"id": "7"}]}]},
            "a call of tools",
            "message 1 of completion has tool_calls, which is not trained; remove the row, or the key.",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]},
            "a call of tools",
            "message 2 of messages has function_call, which is not trained; remove the row, or the key.",
        ),
        *(
            (
                {"messages": [USER, {**ASSISTANT, key: thoughts}]},
                "thoughts beside an answer",
                f"message 2 of messages has {key}, which no chat template is given; write them into the text, as the "
                "model writes its thoughts, or remove the row, or the key.",
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
                "an answer of another weight",
                f"message 2 of messages has the {key} {weight}, but every answer counts as 1; remove the row, or the "
                "key.",
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
            "a call of tools",
            "has tool_calls, which no chat template is given; remove the row, or the key.",
        ),
        ({"messages": HELLO, "kto_tag": False}, "a rejected answer", "kto_tag is false"),
        *(
            ({**row, key: written}, "a rejected answer", f"{key} is {str(written).lower()}, as of an answer that was ")
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
            "an answer of another weight",
            "the row has the weight 0, but every answer counts as 1; remove the row, or the key.",
        ),
        *(
            (
                {**row, "reasoning": "2 and 2 make 4."},
                "thoughts beside an answer",
                "the row has reasoning, which no chat template is given; ",
            )
            for row in (
                {"prompt": "a", "completion": "b"},
                {"prompt": HELLO[:1], "completion": HELLO[1:]},
                {"instruction": "a", "output": "b"},
            )
        ),
        (
            {"messages": HELLO, "tools": [{"name": "f"}]},
            "a call of tools",
            "has tools, which no chat template is given; remove the row, or the key.",
        ),
        (
            {"messages": HELLO, "functions": '[{"name": "f"}]'},
            "a call of tools",
            "has functions, which no chat template is given; remove the row, or the key.",
        ),
        (
            {"messages": HELLO, "instruction": "a"},
            "two forms at once",
            "has both messages and instruction; leave out one of them.",
        ),
        (
            {"prompt": "a", "completion": "b", "instruction": ""},
            "two forms at once",
            "has both prompt, completion and instruction; ",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row: Row, kind: str, message: str) -> None:
    error = error_of(row)
    assert error.kind == kind
    assert str(error).startswith(message)


def test_what_a_row_holds_is_not_quoted_at_length() -> None:
    assert len(str(error_of({"secret " * 20: "a"}))) < 200
    assert len(str(error_of({"messages": [{"role": "secret " * 20, "content": "a"}]}))) < 200
    many = str(error_of({f"key{number}": "a" for number in range(100)}))
    assert many.count("key") == 20 + 2
