"""Learn new pieces of words, add them to a tokenizer, and give its model a row of the embeddings for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from indictune.errors import UserError
from indictune.models.builtin import CountedWords, untrained_word_pieces

MIN_TEXTS = 5  # that a piece is in: who reads a published tokenizer learns no word of few people
# A piece of a Unigram model is a little likelier than its parts: it replaces them, and no other split changes.
_LIKELIER = 1e-3
_BYTES = "ByteLevel"


def form_of(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """How a tokenizer splits words: `WordPiece`, `Unigram`, or `ByteLevel` for BPE of bytes.

    Raises:
        UserError: `tokenizer-cannot-grow`.
    """
    kind = type(tokenizer).__name__
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        kind = content["model"]["type"]
        if kind == "BPE" and _BYTES in json.dumps([content["pre_tokenizer"], content["normalizer"]]):
            return _BYTES
        if kind == "Unigram" and max(tokenizer.get_vocab().values()) >= len(content["model"]["vocab"]):
            kind = "Unigram with special tokens behind its pieces"
    if kind not in ("WordPiece", "Unigram"):
        raise UserError("tokenizer-cannot-grow", "--model", name, reason=f"its type is {kind}")
    return kind


def learn_pieces(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, form: str, is_learned: Callable[[str], bool], wanted: int
) -> dict[str, list[int]]:
    """The most frequent pieces of words that are learned, at most so many -> the tokens that each replaces.

    As in a built-in vocabulary, a piece is in five different texts, has no digit, and comes from no user name.
    """
    backend, normalizer = untrained_word_pieces(), tokenizer.backend_tokenizer.normalizer
    backend.normalizer = normalizer
    words = CountedWords(backend, MIN_TEXTS)
    for text in texts:
        normal = text if normalizer is None else normalizer.normalize_str(text)
        words.add(" ".join(word for word in normal.split() if is_learned(word)))
    letters = sorted({letter for word in words.counts for letter in word})
    trainer = WordPieceTrainer(
        vocab_size=2 * len(letters) + len(tokenizer) + wanted,
        min_frequency=MIN_TEXTS,
        initial_alphabet=letters,
        special_tokens=["[UNK]", *(f"##{letter}" for letter in letters)],  # in this order: see `learn_vocabulary`
        show_progress=False,
    )
    backend.train_from_iterator(words.repeated(), trainer)
    learned = backend.get_vocab()
    del learned["[UNK]"]
    rare, old, found = words.rare(learned), _OldTokens(tokenizer, form), dict[str, list[int]]()
    for piece in sorted(learned.keys() - rare, key=learned.__getitem__):
        text, ids = old.of(piece)
        if len(ids) > 1 and tokenizer.unk_token_id not in ids and len(found) < wanted:
            found[text] = ids
    return found


class _OldTokens:
    """The tokens of a piece before the tokenizer has it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: str) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._model = self._inside = tokenizer.backend_tokenizer.model
        if form == "WordPiece":
            inner = {token[2:]: number for token, number in tokenizer.get_vocab().items() if token.startswith("##")}
            unknown = {str(tokenizer.unk_token): tokenizer.unk_token_id}
            self._inside = WordPiece(inner | unknown, unk_token=str(tokenizer.unk_token), continuing_subword_prefix="")

    def of(self, piece: str) -> tuple[str, list[int]]:
        """A piece, with `##` before one inside a word, as the tokenizer writes it, and its tokens."""
        is_inner, begin = piece.startswith("##"), {"WordPiece": "", "Unigram": "▁", _BYTES: " "}[self._form]
        text = piece[2:] if is_inner else begin + piece
        if self._form == _BYTES:
            return text, cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = [token.id for token in (self._inside if is_inner else self._model).tokenize(text)]
        return piece if self._form == "WordPiece" else text, ids


def with_pieces(tokenizer: PreTrainedTokenizerBase, form: str, pieces: Mapping[str, list[int]]) -> Any:
    """The tokenizer with more pieces. A text without a new piece keeps its tokens."""
    grown: Any = deepcopy(tokenizer)
    if form == _BYTES:  # GPT-2's pattern splits Indic words at every vowel sign, and merges join no parts of it
        grown.add_tokens([AddedToken(text, normalized=False) for text in pieces])
        return grown
    content = json.loads(grown.backend_tokenizer.to_str())
    vocabulary, first = content["model"]["vocab"], max(tokenizer.get_vocab().values()) + 1
    if form == "WordPiece":
        vocabulary |= {text: first + at for at, text in enumerate(pieces)}
    else:
        for text, ids in pieces.items():
            vocabulary.append([text, sum(vocabulary[each][1] for each in ids) + _LIKELIER * (len(ids) - 1)])
    grown._tokenizer = Tokenizer.from_str(json.dumps(content))
    return grown


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, parts: Mapping[int, list[int]]) -> None:
    """Give new tokens rows of the embedding, and of an output layer of its own: the means of those they replace."""
    rows = max(parts) + 1
    if rows > cast(nn.Embedding, model.get_input_embeddings()).num_embeddings:
        model.resize_token_embeddings(rows, mean_resizing=False)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    tables = [getattr(layer, name, None) for layer in layers for name in ("weight", "bias")]
    for table in {id(each): each for each in tables if each is not None}.values():
        means = torch.stack([table[old].float().mean(0) for old in parts.values()])
        table[list(parts)] = means.to(table.dtype)
