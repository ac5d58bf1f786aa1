"""Tokenise conversations in memory."""

from __future__ import annotations

import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.data.bad_rows import BadRows
from indictune.data.chat_tokens import SCHEMA, tokenised
from indictune.data.conversations import Conversations
from indictune.errors import attributed_to


def tokenise_chats(
    rows: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int,
    train_on_prompts: bool = False,
) -> Dataset:
    """The tokens of a split. Bad rows are an error."""
    bad = BadRows(rows.source)
    with attributed_to(rows.origin):
        batches = tokenised(rows.table.to_batches(), tokenizer, template, max_length, train_on_prompts, bad)
        return Dataset(pa.Table.from_batches(batches, SCHEMA))
