"""Conversations of a run, tokenised and packed once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.chat import prepare_chats
from indictune.data.chat.prepare_chats import Chats, set_template, tokenise_chat_splits
from tests.data.chats import load
from tests.problems import problems_raised

# Prepares each file that is named, and writes by how many MiB each raised the most memory used so far.
MEMORY = """
import resource, sys
from transformers import AutoTokenizer
from indictune.data.chat.prepare_chats import set_template, tokenise_chat_splits
from indictune.data.chat.conversations import chat_sources, load_conversations
from indictune.errors import Problems
from indictune.config.chat_arguments import ChatDataArguments
from indictune.models import builtin

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
for path in sys.argv[1:]:
    before = peak()
    args = ChatDataArguments(train_file=path, max_length=512, packing=True)
    splits = load_conversations(chat_sources(args, Problems()), args)
    tokenise_chat_splits(splits, tokenizer, set_template(tokenizer, splits.rows, args), args)
    print(peak() - before)
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four conversations to train on and one to test with, in an empty cache."""
    monkeypatch.chdir(tmp_path)
    for name, questions in (("train.jsonl", ["नमस्ते", "a b c d e f g", "ok", "ok"]), ("test.jsonl", ["ok"])):
        turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in questions]
        Path(name).write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))


@pytest.fixture
def empty_cache(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))


def prepare(tokenizer: PreTrainedTokenizerBase, **options: Any) -> Chats:
    args = ChatDataArguments(
        **{"train_file": "train.jsonl", "test_file": "test.jsonl", "max_length": 64, "packing": True, **options}
    )
    splits = load(args)
    return tokenise_chat_splits(splits, tokenizer, set_template(tokenizer, splits.rows, args), args)


@pytest.mark.usefixtures("empty_cache")
def test_a_second_call_gives_the_same_without_tokenising(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(ids) for ids in prepare(tokenizer, packing=False).datasets["train"]["input_ids"])
    first = prepare(tokenizer, max_length=longest - 1)
    monkeypatch.setattr(prepare_chats, "tokenised_chats", lambda *_: pytest.fail("tokenised again"))
    second = prepare(tokenizer, max_length=longest - 1)
    (note,) = first.notes
    assert note.startswith("--train_file train.jsonl: 1 of 4 rows (25.0%) are longer than --max_length ")
    assert note.endswith(f" and lose their ends; the longest has {longest} tokens.")
    assert first.summary.count("packs of") == 1
    assert (second.notes, second.summary) == (first.notes, first.summary)
    assert second.datasets["test"].to_dict() == first.datasets["test"].to_dict()
    assert second.datasets["train"].to_dict() == first.datasets["train"].to_dict()
    assert sorted(row for rows in second.datasets["train"]["rows"] for row in rows) == [0, 1, 2, 3]
    assert second.location(0) == first.location(0)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    "change",
    [
        *({"max_length": 63}, {"packing": False}, {"chat_template": "llama2"}),
        *({"train_on_prompts": True}, {"train_on_thinking": False}),
    ],
    ids=str,
)
def test_tokens_are_made_anew_when_an_option_changes(
    change: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    before = prepare(tokenizer).datasets["train"]._fingerprint
    assert prepare(tokenizer).datasets["train"]._fingerprint == before
    assert prepare(tokenizer, **change).datasets["train"]._fingerprint != before


@pytest.mark.usefixtures("empty_cache")
def test_tokens_are_made_anew_when_a_row_or_the_tokenizer_changes(tokenizer: PreTrainedTokenizerBase) -> None:
    before = prepare(tokenizer).datasets["train"]._fingerprint
    rows = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(rows.replace("yes", "no", 1))
    assert prepare(tokenizer).datasets["train"]._fingerprint != before
    Path("train.jsonl").write_text(rows)
    tokenizer.add_tokens(["new"])
    assert prepare(tokenizer).datasets["train"]._fingerprint != before


@pytest.mark.usefixtures("empty_cache")
def test_a_refused_row_is_reported_every_time(tokenizer: PreTrainedTokenizerBase) -> None:
    for _ in range(2):
        found = problems_raised(lambda: prepare(tokenizer, max_length=3))
        assert found[0] == "--train_file train.jsonl:1 answers-cut-off"


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.slow
def test_four_times_the_rows_take_no_more_memory() -> None:
    """12,000 rows held in memory as tokens or objects would take about 100 MiB more than 3,000, as Python objects."""
    for name, count in (("few.jsonl", 3_000), ("many.jsonl", 12_000)):
        with open(name, "w", encoding="utf-8") as file:
            for index in range(count):
                row = {"prompt": f"{index} " + "नमस्ते a b " * 10, "completion": f"{index} " + "c d e f " * 20}
                file.write(json.dumps(row) + "\n")
    finished = subprocess.run(
        [sys.executable, "-c", MEMORY, "few.jsonl", "many.jsonl"], stdout=subprocess.PIPE, text=True, check=True
    )
    growth_mib = int(finished.stdout.splitlines()[-1])
    assert growth_mib < 50
