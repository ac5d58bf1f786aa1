"""Measure how well a tokenizer serves each language of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.console_text import table
from indictune.data.conversations import Conversations

_MEASURED_ROWS = 1_000  # of each language; enough for two digits


@dataclass(frozen=True)
class LanguageHealth:
    """How the tokenizer treats one language.

    Attributes:
        language: as the rows name it.
        rows: of this language.
        tokens_per_word: of the contents of up to 1,000 rows, without the chat template; words stand between spaces.
        truncated_share: share of rows that are cut, from 0 to 1.
        unknown_share: share of unknown tokens among those tokens, from 0 to 1.
    """

    language: str
    rows: int
    tokens_per_word: float
    truncated_share: float
    unknown_share: float


def tokenizer_health(
    rows: Conversations, full_lengths: npt.ArrayLike, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[LanguageHealth]:
    """Measure each language, in alphabetical order.

    Args:
        rows: of one split.
        full_lengths: tokens of each row with the chat template, before cutting.
        tokenizer: of the model.
        max_length: tokens that a row keeps.
    """
    languages = rows.table["language"]
    truncated = np.array(full_lengths) > max_length
    health = []
    for language in sorted(pc.unique(languages).to_pylist()):
        indices = np.flatnonzero(pc.equal(languages, language).to_numpy())
        words, tokens, unknown = _counts(_contents(rows.table, language), tokenizer)
        share = float(truncated[indices].mean())
        health.append(LanguageHealth(language, len(indices), tokens / words, share, unknown / tokens))
    return health


def health_table(health: Sequence[LanguageHealth]) -> str:
    """A table with a line for each language; it shows the share of unknown tokens if there are any."""
    header = ["language", "rows", "tokens/word", "truncated", "unknown"]
    body = []
    for row in health:
        shares = [f"{row.truncated_share:.1%}", f"{row.unknown_share:.1%}"]
        body.append([row.language, f"{row.rows:,}", f"{row.tokens_per_word:.2f}", *shares])
    if any(row.unknown_share for row in health):
        return table(header, body)
    return table(header[:-1], [line[:-1] for line in body])


def _contents(table: pa.Table, language: str) -> list[str]:
    """The contents of the first rows of a language. `take` would gather the whole column in memory."""
    chats: list[list[dict[str, str]]] = []
    for batch in table.to_batches():
        some = batch["messages"].filter(pc.equal(batch["language"], language))
        chats += some[: _MEASURED_ROWS - len(chats)].to_pylist()
        if len(chats) == _MEASURED_ROWS:
            break
    return [message["content"] for messages in chats for message in messages]


def _counts(contents: list[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, int, int]:
    """Words, tokens and unknown tokens of the contents."""
    encoded = tokenizer(contents, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    ids = list(chain.from_iterable(encoded))
    return sum(len(content.split()) for content in contents), len(ids), ids.count(tokenizer.unk_token_id)
