"""Conversations that turn out unusable when they become tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.bad_rows import REJECTED
from indictune.data.chat.prepare_chats import Chats, set_template, tokenise_chat_splits
from tests.data.chats import load
from tests.problems import problems_raised

# Takes no system message, as Gemma's, and marks an answer but for one word.
TEMPLATE = """
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ raise_exception('no system message') }}
{%- elif m.role == 'user' or m.content == 'unmarked' -%}{{ m.content }}
{%- else -%}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{%- endif -%}
{%- endfor -%}
"""
LONG = "a b c d " * 40


def chat(question: str, answer: str = "yes", system: str = "") -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


TRAIN = [chat("a"), chat("b", system="s"), chat("c", ""), chat("d", "unmarked"), chat(LONG), chat("e"), chat("f")]
TEST = [chat("g", "unmarked"), chat("h")]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven conversations to train on three are good, of two to test with one; `good.jsonl` has the three."""
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text(TEMPLATE, encoding="utf-8")
    for name, chats in {"train": TRAIN, "test": TEST, "good": [TRAIN[0], *TRAIN[5:]]}.items():
        write(f"{name}.jsonl", [{"messages": messages} for messages in chats])


def write(name: str, rows: list[Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def prepare(tokenizer: PreTrainedTokenizerBase, positions: int | None = None, **options: Any) -> Chats:
    given = {"train_file": "train.jsonl", "max_length": 64, "chat_template": "mine.jinja", **options}
    args = ChatDataArguments(**given)
    splits = load(args)
    return tokenise_chat_splits(splits, tokenizer, set_template(tokenizer, splits.rows, args), args, positions)


def rejected(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / REJECTED).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("packing", [False, True])
def test_they_are_left_out_and_written_down_with_those_that_could_not_be_read(
    tokenizer: PreTrainedTokenizerBase, packing: bool
) -> None:
    allowed: dict[str, Any] = {"bad_rows": "quarantine", "max_bad_fraction": 0.6, "packing": packing}
    good = prepare(tokenizer, train_file="good.jsonl", packing=packing)
    assert good.notes == []
    for _ in range(2):  # the second time from the cache
        chats = prepare(tokenizer, test_file="test.jsonl", **allowed)
        assert (
            chats.datasets["train"].remove_columns("rows").to_dict()
            == good.datasets["train"].remove_columns("rows").to_dict()
        )
        assert len(chats.datasets["test"]) == 1
        places = [chats.location(index) for index in range(len(chats.datasets["train"]))]
        assert sorted(", ".join(places).split(", ")) == ["train.jsonl:1", "train.jsonl:6", "train.jsonl:7"]
        assert (chats.sampled_split, chats.samples(9)[0]) == ("test", [TEST[1]])
        assert [note.partition(", first ")[0] for note in chats.notes] == [
            "--train_file train.jsonl: 3 bad rows were left out",
            "--test_file test.jsonl: 1 bad rows were left out",
        ]
        entries = rejected(chats.folder)
        assert [(entry["file"], entry["line"]) for entry in entries] == [
            *(("train.jsonl", line) for line in (3, 2, 4, 5)),
            ("test.jsonl", 1),
        ]
        reasons = [entry["reason"] for entry in entries]
        codes = [reason.rpartition("[")[2].rstrip("]") for reason in reasons[1:]]
        assert codes == ["template-refuses-row", "answer-unmarked", "answers-cut-off", "answer-unmarked"]
        assert [entry["read"] for entry in entries[1:]] == [
            {"messages": each} for each in (*TRAIN[1:2], *TRAIN[3:5], TEST[0])
        ]


def test_they_stop_the_run_where_nothing_else_is_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    write("train.jsonl", [{"messages": messages} for messages in TRAIN if messages[-1]["content"]])
    assert problems_raised(lambda: prepare(tokenizer, test_file="test.jsonl")) == [
        "--train_file train.jsonl:2 template-refuses-row",
        "--train_file train.jsonl:3 answer-unmarked",
        "--train_file train.jsonl:4 answers-cut-off",
        "--test_file test.jsonl:1 answer-unmarked",
    ]
    write("train.jsonl", [{"messages": messages} for messages in (TRAIN[0], TRAIN[4])])
    assert problems_raised(lambda: prepare(tokenizer)) == [
        "--train_file train.jsonl:2 answers-cut-off",
    ]


def test_a_length_beyond_the_positions_is_not_advised(tokenizer: PreTrainedTokenizerBase) -> None:
    write("train.jsonl", [{"messages": messages} for messages in (TRAIN[0], TRAIN[4])])
    assert problems_raised(lambda: prepare(tokenizer, positions=100)) == [
        "--train_file train.jsonl:2 answers-beyond-positions"
    ]


def test_many_of_them_one_after_another_are_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """More than are tokenised at a time, refused by the template or cut."""
    for bad in (chat("b", system="s"), chat(LONG)):
        write("train.jsonl", [{"messages": each} for each in [chat("a"), *[bad] * 1_100, chat("c"), *[bad] * 3]])
        chats = prepare(tokenizer, bad_rows="quarantine", max_bad_fraction=0.999)
        assert [chats.location(index) for index in range(len(chats.datasets["train"]))] == [
            "train.jsonl:1",
            "train.jsonl:1102",
        ]
        assert [entry["line"] for entry in rejected(chats.folder)] == [*range(2, 1102), *range(1103, 1106)]
