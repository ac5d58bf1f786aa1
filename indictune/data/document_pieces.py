"""Turn documents into rows of tokens: pieces of at most so many, packed end to end, whose words are masked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from indictune.data.bad_rows import copy_rejected
from indictune.data.batching import NO_ROW
from indictune.data.cache import (
    StoredRows,
    build_with_facts,
    map_table,
    smaller_batches,
    stored_batches,
    with_progress,
    write_table,
)
from indictune.data.collation import IGNORED_LABEL, Row
from indictune.data.packing import pack_table
from indictune.data.row_choice import Splits
from indictune.data.text.tokenisation import around, mapped_dataset, tokenizer_parts
from indictune.errors import Problems, UserError, problem

if TYPE_CHECKING:
    from datasets import Dataset

_LIST = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    {"input_ids": _LIST, "labels": _LIST, "rows": _LIST, "length": pa.int32(), "language": pa.string()}
)
_SCORED = _SCHEMA.append(pa.field("characters", pa.int32()))
_AT_ONCE = 200  # documents, which may be long
_MAX_LISTED = 5
_FIXED = 0  # seed of the masks of evaluations

Ids = list[int]

_MASKED, _REPLACED = 0.8, 0.9  # BERT's shares: up to the first, the mask; up to the second, a random token; else kept
PLACES = "masked_places"  # of the batches of `MaskWords`


@dataclass(frozen=True)
class Masking:
    """How words are masked.

    Attributes:
        probability: share of the tokens.
        mask_id: of the token that stands for them.
        others: int [ids], which replace some at random: all but the special tokens.
    """

    probability: float
    mask_id: int
    others: np.ndarray

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, probability: float) -> Masking:
        """The masking by a tokenizer that has a mask."""
        assert tokenizer.mask_token_id is not None
        ids = {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}
        return cls(probability, int(tokenizer.mask_token_id), np.array(sorted(ids)))

    def apply(self, ids: np.ndarray, words: np.ndarray, seed: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Mask random whole words up to the share of their tokens, one word at least.

        Args:
            ids: int [tokens].
            words: the number of each token's word, `IGNORED_LABEL` for none, int [tokens]. A word's tokens stand
                together, and have other numbers than their neighbours.
            seed: the same one gives the same masks.

        Returns:
            The ids that the model reads, and the labels: the ids at masked places, else `IGNORED_LABEL`.
        """
        random, ids = np.random.default_rng(seed), np.array(ids, np.int64)
        begins = np.flatnonzero(np.diff(words, prepend=words[:1] - 1))
        lengths = np.diff(begins, append=len(words))
        is_word = words[begins] != IGNORED_LABEL
        begins, lengths = begins[is_word], lengths[is_word]
        order = random.permutation(len(begins))
        ends = lengths[order].cumsum()
        chosen = order[: max(1, int(np.searchsorted(ends, self.probability * lengths.sum(), side="right")))]
        places = np.concatenate(
            [np.arange(0), *(np.arange(begins[each], begins[each] + lengths[each]) for each in chosen)]
        )
        labels = np.full(len(ids), IGNORED_LABEL, np.int64)
        labels[places] = ids[places]
        fate = random.random(len(places))
        drawn = self.others[random.integers(len(self.others), size=len(places))]
        ids[places] = np.where(fate < _MASKED, self.mask_id, np.where(fate < _REPLACED, drawn, ids[places]))
        return ids, labels


class MaskWords:
    """Mask the rows of a micro-batch, each by the seed, the epoch and its number: however the rows are dealt.

    Args:
        collator: of the masked rows.
        seed: of the run.
    """

    def __init__(self, collator: Callable[[list[Row]], dict[str, Any]], masking: Masking, seed: int) -> None:
        self.collator = collator
        self.masking = masking
        self.seed = seed

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The collator's batch, where `masked_places` are those that count in the flattened `input_ids`, int64
        [masked], and `labels` their tokens, int64 [1, masked]. Without any, there is one that does not count.

        The rows have the numbers of their words as `labels`.
        """
        batch = self.collator([self._masked(row) for row in rows])
        labels = batch["labels"].flatten()
        places = (labels != IGNORED_LABEL).nonzero()[:, 0]
        places = places if len(places) else torch.zeros(1, dtype=torch.int64)
        return batch | {"labels": labels[places][None], PLACES: places}

    def _masked(self, row: Row) -> Row:
        if row["row"] == NO_ROW:
            return row
        ids, labels = self.masking.apply(row["input_ids"], row["labels"], [self.seed, row["epoch"], row["row"]])
        return row | {"input_ids": ids, "labels": labels}


class Piece(NamedTuple):
    """A piece of a document: tokens and labels, the document's number and text, and where each token stands in it."""

    ids: Ids
    labels: Ids
    row: int
    text: str
    places: list[tuple[int, int] | None]  # first character and the one after the last; None: does not count


@dataclass(frozen=True)
class Cutter:
    """Cuts documents into pieces.

    Attributes:
        before, after: tokens around each piece of a masked language model, and around a document of a causal one.
        masking: None for a causal language model.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    before: Ids
    after: Ids
    masking: Masking | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, max_length: int, mlm_probability: float | None) -> Cutter:
        """The cutter for a tokenizer; masked words if there is a probability.

        Raises:
            UserError: `tokenizer-not-for-raw-text`, or `no-room-for-text`.
        """
        before, after = _around(tokenizer, masks=mlm_probability is not None)
        if mlm_probability is not None:
            if max_length <= len(before) + len(after):
                raise UserError("no-room-for-text", "--max_length", max_length, specials=len(before) + len(after))
            return cls(tokenizer, max_length, before, after, Masking.of(tokenizer, mlm_probability))
        end = tokenizer.eos_token_id
        return cls(tokenizer, max_length, before, after if end in (None, *after) else [*after, cast(int, end)], None)

    def pieces(self, texts: list[str], first: int) -> Iterator[Piece]:
        """The pieces of documents, of which the first has this number."""
        settings: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = self.tokenizer(texts, return_offsets_mapping=True, **settings)
        before, after = len(self.before), len(self.after)
        for at, (ids, spans) in enumerate(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)):
            if self.masking is None:
                whole, places = [*self.before, *ids, *self.after], [None] * before + spans + [None] * after
                for start, end in _cuts(len(whole), self.max_length):
                    labels = [IGNORED_LABEL, *whole[start + 1 : end]]
                    yield Piece(whole[start:end], labels, first + at, texts[at], [None, *places[start + 1 : end]])
                continue
            words = encoded.word_ids(at)
            for start, end in _word_cuts(words, self.max_length - before - after):
                whole = [*self.before, *ids[start:end], *self.after]
                labels = [IGNORED_LABEL] * before + words[start:end] + [IGNORED_LABEL] * after
                places = [None] * before + spans[start:end] + [None] * after
                yield Piece(whole, labels, first + at, texts[at], places)

    def scored(self, piece: Piece, number: int) -> tuple[Piece, int]:
        """The piece as evaluations read it, with fixed masks by its number; and the characters that count.

        They are those of masked words, without spaces; or from the first predicted token to the end of the last one.
        """
        if self.masking is None:
            ends = [end for span in piece.places if span is not None for end in span]
            return piece, max(ends, default=0) - min(ends, default=0)
        ids, labels = self.masking.apply(np.array(piece.ids), np.array(piece.labels), [_FIXED, number])
        spans = [piece.places[each] for each in np.flatnonzero(labels != IGNORED_LABEL)]
        letters = {at for span in spans if span is not None for at in range(*span)}
        count = sum(not piece.text[at].isspace() for at in letters)
        return piece._replace(ids=ids.tolist(), labels=labels.tolist()), count


def _around(tokenizer: PreTrainedTokenizerBase, masks: bool) -> tuple[Ids, Ids]:
    """The tokens that stand before and after a text."""
    reason, found = "", None
    if not tokenizer.is_fast:
        reason = "it is a slow one, which does not know where its tokens stand in a text"
    else:
        bare, full = tokenizer("a b", add_special_tokens=False), tokenizer("a b")
        found = around(bare["input_ids"], full["input_ids"])
        reason = "" if found is not None else "it puts special tokens inside of a text"
        if masks and tokenizer.mask_token_id is None:
            reason = "it has no mask token"
        elif masks and len({*bare.word_ids(0)}) < 2:
            reason = "it does not split texts into words, which are masked as a whole"
    if reason or found is None:
        name = tokenizer.name_or_path
        raise UserError("tokenizer-not-for-raw-text", "--model_name_or_path", name, reason=reason)
    return found


def _cuts(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """First and end of each piece. No piece after a cut has one token, which nothing would predict."""
    start = 0
    while start < tokens:
        end = min(start + most, tokens)
        end -= tokens - end == 1
        yield start, end
        start = end


def _word_cuts(words: list[int | None], most: int) -> Iterator[tuple[int, int]]:
    """First and end of each piece, which ends with a word, unless a word is longer than a piece."""
    start = 0
    while start < len(words):
        end = min(start + most, len(words))
        whole = end
        while start < whole < len(words) and words[whole] == words[whole - 1]:
            whole -= 1
        yield start, (end if whole == start else whole)
        start = end if whole == start else whole


@dataclass(frozen=True)
class DocumentRows:
    """The rows of a run as a language model reads them.

    Attributes:
        datasets: by split, columns `input_ids`, `labels`, `length` and `rows` (numbers of the documents). Packed rows
            have `seq_lengths` too; the others `language`; those of evaluations `characters`. The labels of rows that
            are masked in each epoch are the numbers of their words.
        documents: by split.
        folder: holds the rejected rows, if there are any.
        summary: how rows were packed; empty if they are not.
        cut: language -> share of the training documents that are cut.
    """

    datasets: Mapping[str, Dataset]
    documents: Mapping[str, StoredRows]
    folder: Path
    summary: str
    notes: list[str]
    cut: Mapping[str, float]

    def location(self, index: int) -> str:
        """Where training row `index` (from 0), or each document in it, stands: `file:line`."""
        rows = dict.fromkeys(self.datasets["train"][index]["rows"])
        return ", ".join(map(self.documents["train"].location, rows))


def tokenise_documents(splits: Splits[StoredRows], cutter: Cutter, packs: bool) -> DocumentRows:
    """Tokenise all documents, and pack the pieces of the training ones if asked to, or take them from the cache."""

    def make(folder: Path) -> dict[str, Any]:
        copy_rejected(splits.folder, folder)
        summary, notes, cut = "", list[str](), dict[str, float]()
        for split, rows in splits.rows.items():
            path, is_scored = folder / f"{split}.arrow", split != "train"
            batches = _tokenised(stored_batches(splits.folder / f"{split}.arrow"), cutter, is_scored)
            shown = with_progress(batches, f"tokenising the {split} rows")
            write_table(path, _SCORED if is_scored else _SCHEMA, shown)
            pieces = np.bincount(pc.list_flatten(map_table(path)["rows"]).to_numpy(), minlength=len(rows))
            _check_tokens(rows, pieces)
            if count := int((pieces > 1).sum()):
                what = f"{count:,} of {len(rows):,} documents are longer than --max_length {cutter.max_length}"
                notes.append(f"{rows.origin} {rows.source}: {what}, and are cut into pieces.")
            if split == "train":
                cut = _shares(rows.table["language"], pieces > 1)
                summary = pack_table(path, cutter.max_length) if packs else ""
        return {"summary": summary, "notes": notes, "cut": cut}

    masks = None if cutter.masking is None else cutter.masking.probability
    parts = [splits.folder.name, tokenizer_parts(cutter.tokenizer), cutter.max_length, cutter.after, masks, packs]
    folder, facts = build_with_facts("pieces", parts, "The token ids", make)
    datasets = {split: mapped_dataset(folder, split) for split in splits.rows}
    return DocumentRows(datasets, splits.rows, folder, **facts)


def _tokenised(batches: Iterable[pa.RecordBatch], cutter: Cutter, is_scored: bool) -> Iterator[pa.RecordBatch]:
    documents, count = 0, 0
    for batch in smaller_batches(batches, _AT_ONCE):
        languages, rows = batch["language"].to_pylist(), list[dict[str, Any]]()
        for piece in cutter.pieces(batch["text"].to_pylist(), documents):
            read, characters = cutter.scored(piece, count) if is_scored else (piece, 0)
            row = {"input_ids": read.ids, "labels": read.labels, "rows": [read.row], "length": len(read.ids)}
            rows.append(row | {"language": languages[read.row - documents], "characters": characters})
            count += 1
        documents += len(batch)
        yield pa.RecordBatch.from_pylist(rows, _SCORED if is_scored else _SCHEMA)


def _check_tokens(rows: StoredRows, pieces: np.ndarray) -> None:
    """Refuse documents of which the tokenizer makes no token."""
    empty = np.flatnonzero(pieces == 0)[:_MAX_LISTED].tolist()
    Problems(problem("text-without-tokens", rows.origin, rows.location(each)) for each in empty).raise_any()


def _shares(languages: pa.ChunkedArray, is_cut: np.ndarray) -> dict[str, float]:
    """Language -> share of its documents that are cut."""
    by_language = pa.table([languages, pa.array(is_cut)], ["language", "cut"]).group_by("language")
    return {each["language"]: each["cut_mean"] for each in by_language.aggregate([("cut", "mean")]).to_pylist()}
