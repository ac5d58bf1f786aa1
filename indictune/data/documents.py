"""Documents of raw text: read from files, cut into pieces, packed end to end, and their words masked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from indictune.config.shared_arguments import RawTextForm
from indictune.data.bad_rows import BadRows, Batches, Record, copy_rejected
from indictune.data.batching import NO_ROW
from indictune.data.cache import StoredRows, build_with_facts, map_table, smaller_batches, stored_batches, write_table
from indictune.data.collation import IGNORED_LABEL, Row
from indictune.data.columns import document_columns
from indictune.data.packing import TokenRows, pack_table
from indictune.data.read.open_files import decoded_lines
from indictune.data.read.read_files import SplitFiles, checked_extension, checked_rows, string_batches
from indictune.data.read.row_sources import Read, SplitRows
from indictune.data.row_choice import Splits
from indictune.data.text.tokenisation import mapped_dataset, reset_backend, tokenizer_parts
from indictune.errors import Problems, UserError, problem
from indictune.files import kind_of_file

BUILTIN_TEXTS = "builtin:tweets"
# Control characters that no text has, but for white space: they are bytes of another kind of file.
_BINARY = r"[\x00-\x08\x0e-\x1b\x7f]"
_READ_AT_ONCE = 1_000  # documents of a txt file
_LONGEST = 1_000_000  # characters; a longer block of a txt file is several documents, which end with its lines
_TXT = ".txt"
_LIST = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    {"input_ids": _LIST, "labels": _LIST, "rows": _LIST, "length": pa.int32(), "language": pa.string()}
    | {"characters": pa.int32()}  # of the tokens that count; 0 in training rows
)
_AT_ONCE = 200  # documents, which may be long
_MAX_LISTED = 5
_FIXED = 0  # seed of the masks of evaluations
_MASKED, _REPLACED = 0.8, 0.9  # BERT's shares: up to the first, the mask; up to the second, a random token; else kept
PLACES = "masked_places"  # of the batches of `MaskWords`


def document_reader(args: RawTextForm) -> Read[pa.RecordBatch]:
    """Read documents: those of txt files, or the rows of other files and datasets, each a document without a label."""
    wanted = document_columns(args)

    def of_file(path: str, bad: BadRows) -> Iterator[Record]:
        return checked_rows(path, txt_documents(path, bad, args.txt_documents == "lines"), bad)

    def read(rows: SplitRows, bad: BadRows) -> Batches:
        if isinstance(rows, SplitFiles) and _TXT in map(kind_of_file, rows.files):
            documents = ((line, (cast(str, record["text"]), None)) for line, record in rows.records(bad, of_file))
            batches = string_batches(documents, ("text", "language"), _READ_AT_ONCE)
        else:
            batches = rows.batches(wanted, bad)
        for batch in batches:
            is_binary = pc.fill_null(pc.match_substring_regex(batch["text"], _BINARY), False)
            for row in batch.filter(is_binary).to_pylist():
                bad.add(row.pop("line"), "binary-in-text", row)
            texts = batch.filter(pc.invert(is_binary))
            yield texts.append_column("label", pa.nulls(len(texts), pa.string()))

    return read


def txt_documents(path: str, bad: BadRows, one_a_line: bool) -> Iterator[Record]:
    """The documents of a txt file, each with its first line, from 1.

    `bad` gets lines that are not UTF-8, whose documents are left out.
    """
    checked_extension(path, (_TXT,))
    lines, first, size, is_broken = list[str](), 1, 0, False
    for number, (line, byte) in enumerate(decoded_lines(path), 1):
        is_blank = not line.strip()
        if one_a_line or is_blank or size > _LONGEST:
            if lines:
                yield first, {"text": "\n".join(lines)}
            lines, size, is_broken = [], 0, False
        if byte:
            bad.add(number, "not-utf8", line, byte=byte)
            lines, is_broken = [], True
        elif not is_blank and not is_broken:
            first = first if lines else number
            lines.append(line.rstrip("\r\n"))
            size += len(line)
    if lines:
        yield first, {"text": "\n".join(lines)}


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
        word_of = np.cumsum(np.diff(words, prepend=words[:1]) != 0)  # counts documents of a pack apart
        is_word = words != IGNORED_LABEL
        lengths = np.bincount(word_of, weights=is_word)
        order = random.permutation(np.flatnonzero(lengths))
        ends = lengths[order].cumsum()
        chosen = order[: max(1, int(np.searchsorted(ends, self.probability * lengths.sum(), side="right")))]
        is_masked = is_word & np.isin(word_of, chosen)
        labels = np.where(is_masked, ids, IGNORED_LABEL)
        fate = random.random(len(ids))
        drawn = self.others[random.integers(len(self.others), size=len(ids))]
        read = np.where(fate < _MASKED, self.mask_id, np.where(fate < _REPLACED, drawn, ids))
        return np.where(is_masked, read, ids), labels


def counted_places(labels: torch.Tensor) -> torch.Tensor:
    """The places of the flattened labels that count, int64 [counted]; the first place if none does."""
    places = (labels.flatten() != IGNORED_LABEL).nonzero()[:, 0]
    return places if len(places) else labels.new_zeros(1)


class MaskWords:
    """Mask the rows of a micro-batch, each by the seed, the epoch and its number: however the rows are dealt."""

    def __init__(self, collator: Callable[[list[Row]], dict[str, Any]], masking: Masking, seed: int) -> None:
        self.collator, self.masking, self.seed = collator, masking, seed

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The collator's batch, where `masked_places` are those that count in the flattened `input_ids`, int64
        [masked], and `labels` their tokens, int64 [1, masked]. Without any, there is one that does not count.

        The rows have the numbers of their words as `labels`.
        """
        batch = self.collator([row if row["row"] == NO_ROW else self._masked(row) for row in rows])
        places = counted_places(batch["labels"])
        return batch | {"labels": batch["labels"].flatten()[places][None], PLACES: places}

    def _masked(self, row: Row) -> Row:
        ids, labels = self.masking.apply(row["input_ids"], row["labels"], [self.seed, row["epoch"], row["row"]])
        return row | {"input_ids": ids, "labels": labels}


class Piece(NamedTuple):
    """A piece of a document: tokens and labels, the document's number, and first and last character of each token."""

    ids: list[int]
    labels: list[int]  # of a masked model: the number of each token's word
    document: int
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Cutter:
    """Cuts documents into pieces; `masking` is None for a causal language model."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    masking: Masking | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, max_length: int, mlm_probability: float | None) -> Cutter:
        """The cutter for a tokenizer; masked words if there is a probability.

        Raises `UserError`: `tokenizer-not-for-raw-text`, or `no-room-for-text`.
        """
        fits, specials = tokenizer.is_fast, tokenizer.num_special_tokens_to_add()
        if fits and mlm_probability is not None:
            words = {*tokenizer("a b", add_special_tokens=False).word_ids(0)}
            fits = tokenizer.mask_token_id is not None and len(words) == 2
        if not fits:
            raise UserError("tokenizer-not-for-raw-text", "--model_name_or_path", tokenizer.name_or_path)
        if mlm_probability is not None and max_length <= specials:
            raise UserError("no-room-for-text", "--max_length", max_length, specials=specials)
        if mlm_probability is None:
            return cls(tokenizer, max_length, None)
        others = {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}
        masking = Masking(mlm_probability, cast(int, tokenizer.mask_token_id), np.array(sorted(others)))
        return cls(tokenizer, max_length, masking)

    def pieces(self, texts: list[str]) -> Iterator[Piece]:
        """The pieces of documents that have something to predict. Special tokens are around each piece of a masked
        model, and around a whole document of a causal one, which an end token follows."""
        settings: dict[str, Any] = {"return_offsets_mapping": True, "verbose": False}
        if self.masking is not None:
            settings |= {"truncation": True, "max_length": self.max_length, "return_overflowing_tokens": True}
        encoded = self.tokenizer(texts, **settings)
        for at, (ids, spans) in enumerate(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)):
            if self.masking is not None:
                words = [IGNORED_LABEL if word is None else word for word in encoded.word_ids(at)]
                made = [Piece(ids, words, encoded["overflow_to_sample_mapping"][at], spans)]
            else:
                made = list(self._continued(ids, at, spans))
            yield from (piece for piece in made if {*piece.labels} - {IGNORED_LABEL})

    def _continued(self, ids: list[int], document: int, spans: list[tuple[int, int]]) -> Iterator[Piece]:
        end = self.tokenizer.eos_token_id
        if ids and end is not None and ids[-1] != end:
            ids, spans = [*ids, end], [*spans, (0, 0)]
        for start in range(0, len(ids), self.max_length):
            piece = ids[start : start + self.max_length]
            yield Piece(piece, [IGNORED_LABEL, *piece[1:]], document, spans[start : start + self.max_length])

    def scored(self, piece: Piece, text: str, number: int) -> tuple[Piece, int]:
        """The piece as evaluations read it, with fixed masks by its number; and the characters that count.

        They are those of masked words, without spaces; or from the first predicted token to the end of the last one.
        """
        if self.masking is not None:
            masked = self.masking.apply(np.array(piece.ids), np.array(piece.labels), [_FIXED, number])
            piece = piece._replace(ids=masked[0].tolist(), labels=masked[1].tolist())
        counts = zip(piece.spans, piece.labels, strict=True)
        spans = [span for span, label in counts if label != IGNORED_LABEL and span[0] < span[1]]
        if self.masking is None:
            return piece, max((end for _, end in spans), default=0) - min((start for start, _ in spans), default=0)
        letters = {at for span in spans for at in range(*span)}
        return piece, sum(not text[at].isspace() for at in letters)


def tokenise_documents(splits: Splits[StoredRows], cutter: Cutter) -> TokenRows:
    """Tokenise all documents, and pack the pieces of the training ones, or take them from the cache."""

    def make(folder: Path) -> dict[str, Any]:
        copy_rejected(splits.folder, folder)
        summary, notes = "", list[str]()
        for split, rows in splits.rows.items():
            path = folder / f"{split}.arrow"
            batches = _tokenised(stored_batches(splits.folder / path.name), cutter, is_scored=split != "train")
            write_table(path, _SCHEMA, batches, f"tokenising the {split} rows")
            pieces = np.bincount(pc.list_flatten(map_table(path)["rows"]).to_numpy(), minlength=len(rows))
            empty = np.flatnonzero(pieces == 0)[:_MAX_LISTED].tolist()
            Problems(problem("text-without-tokens", rows.origin, rows.location(each)) for each in empty).raise_any()
            if count := int((pieces > 1).sum()):
                what = f"{count:,} of {len(rows):,} documents are longer than --max_length {cutter.max_length}"
                notes.append(f"{rows.origin} {rows.source}: {what}, and are cut into pieces.")
        if "train" in splits.rows:
            summary = pack_table(folder / "train.arrow", cutter.max_length)
        return {"summary": summary, "notes": notes}

    masks = None if cutter.masking is None else cutter.masking.probability
    parts = [splits.folder.name, tokenizer_parts(cutter.tokenizer), cutter.max_length, masks]
    folder, facts = build_with_facts("pieces", parts, "The token ids", make)
    reset_backend(cutter.tokenizer)
    datasets = {split: mapped_dataset(folder, split) for split in splits.rows}
    return TokenRows(datasets, splits.rows, folder, **facts)


def _tokenised(batches: Iterable[pa.RecordBatch], cutter: Cutter, is_scored: bool) -> Batches:
    documents, count = 0, 0
    for batch in smaller_batches(batches, _AT_ONCE):
        texts, languages, rows = batch["text"].to_pylist(), batch["language"].to_pylist(), list[dict[str, Any]]()
        for piece in cutter.pieces(texts):
            at = piece.document
            read, characters = cutter.scored(piece, texts[at], count) if is_scored else (piece, 0)
            row = {"input_ids": read.ids, "labels": read.labels, "rows": [documents + at], "length": len(read.ids)}
            rows.append(row | {"language": languages[at], "characters": characters})
            count += 1
        documents += len(batch)
        yield pa.RecordBatch.from_pylist(rows, _SCHEMA)
