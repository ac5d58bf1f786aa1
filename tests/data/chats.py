"""Load conversations, and tokenise them in memory."""

from __future__ import annotations

import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.shared_arguments import BadRowArguments
from indictune.data.bad_rows import BadRows
from indictune.data.chat.chat_tokens import SCHEMA, tokenised_chats
from indictune.data.chat.conversations import Conversations, chat_sources, evaluated_file, load_conversations
from indictune.data.row_choice import Splits
from indictune.errors import Problems, attributed_to


def load(args: ChatDataArguments) -> Splits[Conversations]:
    """The conversations of a run."""
    problems = Problems()
    return load_conversations(chat_sources(args, problems), args, problems)


def load_test_file(path: str) -> Conversations:
    """The conversations of a file that is evaluated."""
    found: Conversations = load_conversations(evaluated_file(path), BadRowArguments()).rows["test"]
    return found


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
        batches = tokenised_chats(rows.table.to_batches(), tokenizer, template, max_length, train_on_prompts, bad)
        return Dataset(pa.Table.from_batches(batches, SCHEMA))
