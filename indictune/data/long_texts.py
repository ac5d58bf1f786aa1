"""Fit texts that have more tokens than the limit: keep both ends, or read them in windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from indictune.config.row_arguments import LongText
from indictune.errors import UserError

Ids = list[int]
Windows = Callable[[list[str]], list[list[Ids]]]  # texts -> the windows of each

SHARE_OF_OVERLAP = 4  # neighbouring windows share a quarter of their tokens
USUAL_PERCENTILE = 99
_MEASURED_TEXTS = 20_000
_AT_ONCE = 1_000
FLAG = "--long_text"


def window_encoder(
    tokenizer: PreTrainedTokenizerBase, whole: Callable[[list[str]], list[Ids]], max_length: int, long_text: LongText
) -> Windows:
    """Turns texts into windows of at most `max_length` tokens, special ones included. A short text has one.

    `head_tail` gives every text one window: its first and its last tokens. In `window`, each window begins three
    quarters after the previous one, and the last one ends with the text.

    Args:
        tokenizer: of the model.
        whole: token ids of texts, uncut.
        max_length: of a window.
        long_text: `head_tail` or `window`.

    Raises:
        UserError: `long-text-impossible`.
    """
    before, after = special_ids(tokenizer)
    room = max_length - len(before) - len(after)
    if room < 1:
        raise UserError("no-room-for-text", "--max_length", max_length, specials=len(before) + len(after))
    cut = _both_ends if long_text == "head_tail" else _overlapping

    def windows(texts: list[str]) -> list[list[Ids]]:
        found = []
        for ids in whole(texts):
            content = ids[len(before) : len(ids) - len(after)]
            parts = [content] if len(content) <= room else cut(content, room)
            found.append([[*before, *part, *after] for part in parts])
        return found

    return windows


def _both_ends(ids: Ids, room: int) -> list[Ids]:
    head = (room + 1) // 2
    return [ids[:head] + ids[len(ids) - (room - head) :]]


def _overlapping(ids: Ids, room: int) -> list[Ids]:
    last = len(ids) - room
    return [ids[start : start + room] for start in (*range(0, last, room - room // SHARE_OF_OVERLAP), last)]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[Ids, Ids]:
    """The tokens that the tokenizer adds before and after a text.

    Raises:
        UserError: `long-text-impossible`: it puts some inside the text.
    """
    text = "a b"
    bare = cast(Ids, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    full = cast(Ids, tokenizer(text, verbose=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise UserError("long-text-impossible", FLAG, tokenizer=tokenizer.name_or_path)


def usual_length(texts: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase, positions: int | None) -> int:
    """The 99th percentile of the texts' tokens, special ones included, within the model's positions.

    Of many texts, up to 20,000 are measured, evenly spaced.

    Args:
        texts: of the training rows.
        tokenizer: of the model.
        positions: of the model; None for no limit.
    """
    step = -(-len(texts) // _MEASURED_TEXTS)
    measured = texts.take(pa.array(range(0, len(texts), step)))
    lengths = [length for some in _pieces(measured) for length in _lengths(some, tokenizer)]
    usual = max(3, int(np.percentile(lengths, USUAL_PERCENTILE, method="higher")))
    return usual if positions is None else min(usual, positions)


def _pieces(texts: pa.ChunkedArray) -> Iterator[list[str]]:
    for start in range(0, len(texts), _AT_ONCE):
        yield texts.slice(start, _AT_ONCE).to_pylist()


def _lengths(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    return [len(ids) for ids in cast(list[Ids], encoded)]
