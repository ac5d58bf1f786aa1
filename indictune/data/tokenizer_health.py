"""Measure how well a tokenizer serves each language of the rows."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.console_text import table
from indictune.data.conversations import Conversations

_MEASURED_ROWS = 1_000  # of each language; enough for two digits


def tokenizer_health(rows: Conversations, tokens: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> str:
    """A table with a line for each language, in alphabetical order.

    Its columns are the number of rows, the tokens per word, and the share of rows that are cut. Tokens per word are
    measured on up to 1,000 rows, without the chat template.
    """
    cut = pc.greater(tokens.data["full_length"], max_length)
    by_language = pa.table([tokens.data["language"], cut], ["language", "cut"]).group_by("language")
    body = []
    for line in by_language.aggregate([("cut", "count"), ("cut", "mean")]).sort_by("language").to_pylist():
        contents = _contents(rows.table, line["language"])
        encoded = tokenizer(contents, add_special_tokens=False, return_attention_mask=False, verbose=False)
        tokens_per_word = sum(map(len, encoded["input_ids"])) / sum(len(content.split()) for content in contents)
        shown = [f"{line['cut_count']:,}", f"{tokens_per_word:.2f}", f"{line['cut_mean']:.1%}"]
        body.append([line["language"], *shown])
    return table(["language", "rows", "tokens/word", "truncated"], body)


def _contents(conversations: pa.Table, language: str) -> list[str]:
    """The contents of the first rows of a language. `take` would gather the whole column in memory."""
    chats: list[list[dict[str, str]]] = []
    for batch in conversations.to_batches():
        some = batch["messages"].filter(pc.equal(batch["language"], language))
        chats += some[: _MEASURED_ROWS - len(chats)].to_pylist()
        if len(chats) == _MEASURED_ROWS:
            break
    return [message["content"] for messages in chats for message in messages]
