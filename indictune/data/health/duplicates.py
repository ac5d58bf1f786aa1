"""Find texts that several rows have, those with other labels, and held-out texts that nearly repeat training rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.columns import shortened
from indictune.data.health.findings import MAX_EXAMPLES, Finding
from indictune.data.labels import MULTI_LABEL, REGRESSION, parts
from indictune.data.rows import Column, StoredRows, text_keys
from indictune.data.text.cleaning import HANDLE_PLACEHOLDER, URL_PLACEHOLDER, WORD

if TYPE_CHECKING:
    from rensa import RMinHash

_MANY_SHARE, _MANY_ROWS = 0.01, 10
_SHINGLE = 5
_MIN_LETTERS = 20  # shorter texts, such as "nice movie", are alike by chance
_SIMILAR = 0.8  # Jaccard similarity of the shingles
# A pair of that similarity shares a band of 4 of 64 hashes with a probability of 0.9998.
_HASHES, _BANDS, _SEED = 64, 16, 0
_AT_ONCE = 2_000
_BETWEEN_WORDS = re.compile(rf"{HANDLE_PLACEHOLDER}\b|\b{URL_PLACEHOLDER}\b|[^{WORD}]+")


def same_texts(splits: Mapping[str, StoredRows], problem_type: str | None) -> list[Finding]:
    """`duplicate_rows` repeat the text of an earlier row of the split.

    `conflicting_labels` are texts with several labels.

    Args:
        splits: by name; each has columns `text` and `label`.
        problem_type: of the run. Scores of a regression may differ.
    """
    keys = {split: text_keys(Column(rows.table["text"])) for split, rows in splits.items()}
    found = [repeated_rows(rows, keys[split]) for split, rows in splits.items()]
    if problem_type != REGRESSION:
        found.append(_contradictions(list(splits.values()), np.concatenate(list(keys.values())), problem_type))
    return [each for each in found if each.count]


def repeated_rows(rows: StoredRows, keys: npt.NDArray[np.uint64]) -> Finding:
    """Rows whose key, uint64 [rows], an earlier row has."""
    first_of, whole = np.unique(keys, return_index=True)[1], len(keys)
    later = np.setdiff1d(np.arange(whole), first_of)
    examples = [rows.location(int(row)) for row in later[:MAX_EXAMPLES]]
    count, share = len(later), len(later) / whole
    where = f", first {examples[0]}" if examples else ""
    warns = share >= _MANY_SHARE and count >= _MANY_ROWS
    note = f"{rows.origin} {rows.source}: {count:,} of {whole:,} rows ({share:.1%}) repeat the text of another{where}."
    return Finding("duplicate_rows", count, whole, note, None, examples, warns)


def _contradictions(rows: Sequence[StoredRows], keys: npt.NDArray[np.uint64], problem_type: str | None) -> Finding:
    codes = _codes([each.table["label"] for each in rows], problem_type)
    split_of_row = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    order = np.lexsort((codes, keys))
    first, second = order[:-1], order[1:]
    is_same_text = keys[first] == keys[second]
    differs = is_same_text & (codes[first] != codes[second])
    texts = np.unique(keys[first[differs]])
    in_several = np.isin(texts, keys[first[is_same_text & (split_of_row[first] != split_of_row[second])]]).sum()
    pairs = sorted(map(sorted, zip(first[differs].tolist(), second[differs].tolist(), strict=True)))
    examples = [" and ".join(_shown(rows, number) for number in pair) for pair in pairs[:MAX_EXAMPLES]]
    over_splits = f", {in_several:,} of them over several splits" if in_several else ""
    count, of = len(texts), len(np.unique(keys))
    share = f"{100 * count / of:.3g}%"  # of few texts too
    note = f"{count:,} of {of:,} texts ({share}) have several labels{over_splits}, such as {''.join(examples[:1])}."
    return Finding("conflicting_labels", count, of, note, None, examples)


def _codes(labels: Sequence[pa.ChunkedArray], problem_type: str | None) -> npt.NDArray[np.int64]:
    """A number for each row, equal where the labels are."""
    of_all = pa.chunked_array([chunk for column in labels for chunk in column.chunks], pa.string())
    written = of_all.unique()
    names = [" ".join(sorted(parts(each))) if problem_type == MULTI_LABEL else each for each in written.to_pylist()]
    code_of = {name: code for code, name in enumerate(names)}
    codes = np.array([code_of[name] for name in names], np.int64)
    places: npt.NDArray[np.int64] = pc.index_in(of_all, value_set=written).to_numpy()
    return codes[places]


def _shown(splits: Sequence[StoredRows], number: int) -> str:
    """Where a row of all splits, counted through, stands, with its label."""
    for rows in splits:
        if number < len(rows):
            break
        number -= len(rows)
    return f"{rows.location(number)} ({shortened(rows.table['label'][number].as_py())})"


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
    from rensa import RMinHashLSH  # only for runs whose health is measured

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
    from rensa import RMinHash

    return list(RMinHash.from_token_sets(texts.values(), _HASHES, _SEED))
