"""Mask whole words of tokenised rows: drawn anew in each epoch of a training, and fixed for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from indictune.data.batching import NO_ROW
from indictune.data.collation import IGNORED_LABEL, Row

_MASKED, _REPLACED = 0.8, 0.9  # BERT's shares: up to the first, the mask; up to the second, a random token; else kept
PLACES = "masked_places"


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
