"""Find held-out texts that nearly stand in the training rows: MinHash of their letters, five at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rensa import RMinHash, RMinHashLSH

from indictune.data.text.cleaning import HANDLE_PLACEHOLDER, URL_PLACEHOLDER, WORD

_SHINGLE = 5
_MIN_LETTERS = 20  # shorter texts, such as "nice movie", are alike by chance
_SIMILAR = 0.8  # Jaccard similarity of the shingles
# A pair of that similarity shares a band of 4 of 64 hashes with a probability of 0.9998.
_HASHES, _BANDS, _SEED = 64, 16, 0
_AT_ONCE = 2_000
_BETWEEN_WORDS = re.compile(rf"{HANDLE_PLACEHOLDER}\b|\b{URL_PLACEHOLDER}\b|[^{WORD}]+")


@dataclass(frozen=True)
class NearDuplicate:
    """A held-out text and the most similar training text, by their numbers; `similarity` is exact, above 0.8."""

    held_out: int
    train: int
    similarity: float


def near_duplicates(train: Sequence[str], held_out: Sequence[str]) -> list[NearDuplicate]:
    """The held-out texts that a training text resembles but for case, punctuation, handles, links and a few letters.

    Texts that stand in the training rows as they are, and those below 20 letters, are left out.
    """
    mine, index = _long_enough(held_out, 0), RMinHashLSH(_SIMILAR, _HASHES, _BANDS)
    for number, hashes in zip(mine, _hashes(mine), strict=True):
        index.insert(number, hashes)
    best: dict[int, NearDuplicate] = {}
    same: set[int] = set()
    for start in range(0, len(train), _AT_ONCE):
        theirs = _long_enough(train[start : start + _AT_ONCE], start)
        for row, found in zip(theirs, index.query_all(_hashes(theirs)), strict=True):
            same.update(number for number in found if train[row] == held_out[number])
            for number in found:
                similarity = len(theirs[row] & mine[number]) / len(theirs[row] | mine[number])
                if similarity >= _SIMILAR and (number not in best or similarity > best[number].similarity):
                    best[number] = NearDuplicate(number, row, similarity)
    return [best[number] for number in sorted(best.keys() - same)]


def _long_enough(texts: Sequence[str], start: int) -> dict[int, set[str]]:
    """The shingles of the texts that are not too short, by their numbers, from `start`."""
    found = {}
    for number, text in enumerate(texts, start):
        letters = _BETWEEN_WORDS.sub(" ", text.casefold()).strip()
        if len(letters) >= _MIN_LETTERS:
            found[number] = {letters[at : at + _SHINGLE] for at in range(len(letters) - _SHINGLE + 1)}
    return found


def _hashes(texts: Mapping[int, set[str]]) -> list[RMinHash]:
    return list(RMinHash.from_token_sets(texts.values(), _HASHES, _SEED))
