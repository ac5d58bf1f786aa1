"""Tokens per word and truncation of each language."""

from __future__ import annotations

import pyarrow as pa
from datasets import Dataset
from tokenizers import processors

from indictune.data.conversations import Conversations
from indictune.data.tokenizer_health import tokenizer_health
from tests.data.test_chat_tokens import byte_level_tokenizer
from tests.models.tiny import words_tokenizer


def rows(*chats: tuple[str, str, str]) -> Conversations:
    """Of (language, question, answer)."""
    columns = {
        "messages": [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for _, question, answer in chats
        ],
        "language": [language for language, _, _ in chats],
        "line": pa.array(range(1, 1 + len(chats)), pa.int64()),
    }
    return Conversations(pa.table(columns), "t.jsonl", "--train_file")


def tokens(languages: list[str], full_lengths: list[int]) -> Dataset:
    return Dataset.from_dict({"language": languages, "full_length": full_lengths})


def test_each_language_is_measured_by_itself() -> None:
    chats = rows(("te", "మంచి చెడు", "zebra\nok"), ("hi", "ok .", "बुरा"), ("te", "ok", "ok"), ("te", "ok", "ok"))
    lengths = tokens(["te", "hi", "te", "te"], [9, 4, 5, 6])
    assert tokenizer_health(chats, lengths, words_tokenizer(), max_length=5) == "\n".join(
        [
            "language  rows  tokens/word  truncated",
            "--------------------------------------",
            "hi           1         1.00       0.0%",
            "te           3         1.00      66.7%",
        ]
    )


def test_tokens_per_word_leave_out_the_special_tokens() -> None:
    # Three bytes for each of అ and ఆ, one for the space between them, one for each letter x.
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    health = tokenizer_health(rows(("te", "అ ఆ", "xx")), tokens(["te"], [3]), tokenizer, max_length=5)
    assert health.splitlines()[2].split() == ["te", "1", "3.00", "0.0%"]


def test_tokens_per_word_come_from_the_first_thousand_rows_of_a_language_and_truncation_from_all() -> None:
    chats = [("hi", "x", "x")] * 1_000 + [("te", "xxx", "xxx")] + [("hi", "xxx", "xxx")] * 1_000
    lengths = tokens([language for language, _, _ in chats], [2] * 1_001 + [6] * 1_000)
    health = tokenizer_health(rows(*chats), lengths, byte_level_tokenizer(), max_length=5)
    assert [line.split() for line in health.splitlines()[2:]] == [
        ["hi", "2,000", "1.00", "50.0%"],
        ["te", "1", "3.00", "0.0%"],
    ]
