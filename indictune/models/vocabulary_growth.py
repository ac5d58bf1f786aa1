"""Give a tokenizer new pieces, and a model a row of its embeddings for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from indictune.errors import UserError

# A piece of a Unigram model is a little likelier than its parts: it replaces them, and no other split changes.
_LIKELIER = 1e-3


Parts = dict[int, tuple[int, ...]]  # new token -> those that it replaces


# The text of a piece, the tokens that it replaces, and the pair of texts that it joins, if any.
NewPiece = tuple[str, tuple[int, ...], tuple[str, str] | None]


def form_of(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """How a tokenizer splits words: `WordPiece`, `Unigram`, `BPE`, or `bytes` for BPE of bytes.

    Raises:
        UserError: `tokenizer-cannot-grow`.
    """
    if not tokenizer.is_fast:
        raise UserError("tokenizer-cannot-grow", "--model", name, reason=f"{type(tokenizer).__name__} is a slow one")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, reason = content["model"], ""
    form: str = model["type"]
    if form == "BPE" and "ByteLevel" in json.dumps([content["pre_tokenizer"], content["normalizer"]]):
        form = "bytes"
    elif form not in ("WordPiece", "Unigram", "BPE"):
        reason = f"its type is {form}, and pieces join tokens of WordPiece, Unigram or BPE"
    elif form == "BPE" and not model["merges"]:
        reason = "it splits texts into characters, and has no merges"
    elif form == "WordPiece" and model["continuing_subword_prefix"] != "##":
        reason = "it does not write ## before inner pieces"
    elif form == "BPE" and (model["continuing_subword_prefix"] or model["end_of_word_suffix"]):
        reason = "it marks the ends of words"
    elif form == "Unigram" and max(tokenizer.get_vocab().values()) >= len(model["vocab"]):
        reason = "its special tokens have the ids after those of its pieces"
    if reason:
        raise UserError("tokenizer-cannot-grow", "--model", name, reason=reason)
    return form


def with_pieces(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[NewPiece], form: str) -> Parts:
    """Add pieces to a tokenizer; returns the tokens that each new one replaces.

    A text without a new piece keeps its tokens: merges come after all others, a Unigram piece is hardly likelier than
    its parts, and WordPiece and the added tokens of BPE of bytes match the piece's own letters.
    """
    texts = list(dict.fromkeys(text for text, *_ in pieces))
    fast: Any = tokenizer
    if form == "bytes":  # GPT-2's pattern splits Indic words at every vowel sign, and merges join no parts of it
        fast.add_tokens([AddedToken(text, normalized=False) for text in texts])
    else:
        content, first = json.loads(fast.backend_tokenizer.to_str()), max(tokenizer.get_vocab().values()) + 1
        _extend(content["model"], pieces, {text: first + at for at, text in enumerate(texts)})
        fast._tokenizer = Tokenizer.from_str(json.dumps(content))
    ids = tokenizer.get_vocab()
    return {ids[text]: parts for text, parts, _ in reversed(pieces)}


def _extend(model: dict[str, Any], pieces: Sequence[NewPiece], ids: Mapping[str, int]) -> None:
    if model["type"] == "Unigram":
        for text, parts in {text: parts for text, parts, _ in reversed(pieces)}.items():
            score = sum(model["vocab"][part][1] for part in parts) + _LIKELIER * (len(parts) - 1)
            model["vocab"].append([text, score])
        return
    model["vocab"] |= ids
    if model["type"] == "BPE":
        are_texts = isinstance(model["merges"][0], str)
        pairs = [pair for *_, pair in pieces if pair is not None]
        model["merges"] += [" ".join(pair) if are_texts else list(pair) for pair in pairs]


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, parts: Parts) -> None:
    """Give new tokens rows of the embedding, and of an output layer of its own: the means of those they replace."""
    rows = max(parts) + 1
    if rows > cast(nn.Embedding, model.get_input_embeddings()).num_embeddings:
        model.resize_token_embeddings(rows, mean_resizing=False)
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights = {id(each): each for each in _tables(model.get_input_embeddings(), output)}
    for weight in weights.values():
        means = torch.stack([weight[list(old)].float().mean(0) for old in parts.values()])
        weight[list(parts)] = means.to(weight.dtype)


def _tables(*modules: Any) -> list[torch.Tensor]:
    """The weight of each module, and the bias of a layer that has one."""
    found = [getattr(module, name, None) for module in modules if module is not None for name in ("weight", "bias")]
    return [each for each in found if each is not None]
