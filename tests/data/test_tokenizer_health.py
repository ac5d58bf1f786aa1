"""Tokens a word, truncation and unknown tokens of each language."""

from __future__ import annotations

import pyarrow as pa
from tokenizers import pre_tokenizers, processors

from indictune.data.conversations import Conversations
from indictune.data.tokenizer_health import LanguageHealth, health_table, tokenizer_health
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


def test_each_language_is_measured_by_itself() -> None:
    chats = rows(("te", "మంచి చెడు", "zebra\nok"), ("hi", "ok .", "बुरा"), ("te", "ok", "ok"), ("te", "ok", "ok"))
    health = tokenizer_health(chats, [9, 4, 5, 6], words_tokenizer(), max_length=5)
    assert health == [LanguageHealth("hi", 1, 1.0, 0.0, 0.0), LanguageHealth("te", 3, 1.0, 2 / 3, 1 / 8)]


def test_unknown_tokens_are_a_share_of_the_tokens() -> None:
    tokenizer = words_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # takes "." off a word
    (health,) = tokenizer_health(rows(("hi", "zebra. ok.", "ok.")), [9], tokenizer, max_length=9)
    assert health == LanguageHealth("hi", 1, 2.0, 0.0, 1 / 6)


def test_tokens_per_word_leave_out_the_special_tokens() -> None:
    # Three bytes for each of అ and ఆ, one for the space between them, one for each letter x.
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    (health,) = tokenizer_health(rows(("te", "అ ఆ", "xx")), [3], tokenizer, max_length=5)
    assert health == LanguageHealth("te", 1, 9 / 3, 0.0, 0.0)


def test_tokens_per_word_come_from_the_first_thousand_rows_of_a_language_and_truncation_from_all() -> None:
    chats = [("hi", "x", "x")] * 1_000 + [("te", "xxx", "xxx")] + [("hi", "xxx", "xxx")] * 1_000
    health = tokenizer_health(rows(*chats), [2] * 1_001 + [6] * 1_000, byte_level_tokenizer(), max_length=5)
    assert health == [LanguageHealth("hi", 2_000, 1.0, 0.5, 0.0), LanguageHealth("te", 1, 3.0, 0.0, 0.0)]


def test_the_table_has_a_line_for_each_language() -> None:
    health = [LanguageHealth("hi", 1_200, 1.504, 0.0, 0.0), LanguageHealth("Telugu", 3, 12.0, 2 / 3, 0.0)]
    assert health_table(health) == "\n".join(
        [
            "language   rows  tokens/word  truncated",
            "---------------------------------------",
            "hi        1,200         1.50       0.0%",
            "Telugu        3        12.00      66.7%",
        ]
    )


def test_the_table_shows_unknown_tokens_where_there_are_some() -> None:
    health = [LanguageHealth("hi", 1, 1.5, 0.0, 0.0), LanguageHealth("te", 3, 2.0, 0.0, 0.125)]
    assert health_table(health) == "\n".join(
        [
            "language  rows  tokens/word  truncated  unknown",
            "-----------------------------------------------",
            "hi           1         1.50       0.0%     0.0%",
            "te           3         2.00       0.0%    12.5%",
        ]
    )
