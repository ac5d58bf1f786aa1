"""Find repeated and contradictory rows, and labels that are rare or give themselves away."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.data.cache import StoredRows
from indictune.data.columns import BETWEEN_TEXTS, shortened
from indictune.data.labels import MULTI_LABEL, REGRESSION, first_location, has_classes, label_counts, names, parts
from indictune.data.text.cleaning import HANDLE_PLACEHOLDER, URL_PLACEHOLDER, WORD

if TYPE_CHECKING:
    from rensa import RMinHash

MAX_EXAMPLES = 5
# Findings whose examples are texts or words of rows.
_WITH_TEXTS = ("mojibake", "escaped_texts", "unknown_tokens", "token_collisions", "label_sources")


@dataclass(frozen=True)
class Finding:
    """Something that some of the rows, words or tokens have.

    Attributes:
        name: of the kind, such as `near_duplicates`.
        count: how many have it, of how many that were looked at.
        note: a sentence for the user. It holds no text or word of a row, because model cards are public.
        examples: the first few, which may hold texts and words of rows.
        warns: whether a run warns of it. Others are only listed.
    """

    name: str
    count: int
    of: int
    note: str
    language: str | None = None
    examples: list[str] = field(default_factory=list)
    warns: bool = True

    @property
    def share(self) -> float:
        """Of those that were looked at."""
        return self.count / max(self.of, 1)

    @property
    def in_full(self) -> str:
        """The note, and the texts and words of rows that it leaves out: for this machine, not for a model card."""
        has_texts = self.name in _WITH_TEXTS and self.examples
        return f"{self.note} Such as: {', '.join(self.examples)}." if has_texts else self.note

    def as_json(self) -> dict[str, Any]:
        """As `health.json` has it."""
        return {"name": self.name, "language": self.language, "share": self.share} | asdict(self)


@dataclass
class Found:
    """What is collected while the rows of a run are read: notes for the user, findings, and the names of labels."""

    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def warning_notes(findings: Iterable[Finding]) -> list[str]:
    """The notes that a run warns of."""
    return [each.note for each in findings if each.warns]


_MANY_SHARE, _MANY_ROWS = 0.01, 10
_SHINGLE = 5
_MIN_LETTERS = 20  # shorter texts, such as "nice movie", are alike by chance
_SIMILAR = 0.8  # Jaccard similarity of the shingles
# A pair of that similarity shares a band of 4 of 64 hashes with a probability of 0.9998.
_HASHES, _BANDS, _SEED = 64, 16, 0
_AT_ONCE = 2_000
_BETWEEN_WORDS = re.compile(rf"{HANDLE_PLACEHOLDER}\b|\b{URL_PLACEHOLDER}\b|[^{WORD}]+")


def same_texts(splits: Mapping[str, StoredRows], problem_type: str | None) -> list[Finding]:
    """Rows that repeat the text of an earlier row of their split, and texts with several labels, if rows have some.

    Scores of a regression may differ.
    """
    # Python's own hashes are good in this process alone, and three times as fast.
    keys = {split: np.fromiter(map(hash, rows.texts), np.int64).view(np.uint64) for split, rows in splits.items()}
    found = [repeated_rows(rows, keys[split]) for split, rows in splits.items()]
    if has_classes(next(iter(splits.values())).table, problem_type):
        found.append(_contradictions(list(splits.values()), np.concatenate(list(keys.values())), problem_type))
    return [each for each in found if each.count]


def repeated_rows(rows: StoredRows, keys: npt.NDArray[np.uint64]) -> Finding:
    """Rows whose key, uint64 [rows], an earlier row has."""
    whole = len(keys)
    later = np.delete(np.arange(whole), np.unique(keys, return_index=True)[1])
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
    same = np.flatnonzero(np.diff(keys[order]) == 0)
    first, second = order[same], order[same + 1]
    differs = codes[first] != codes[second]
    texts = np.unique(keys[first[differs]])
    in_several = np.isin(texts, keys[first[split_of_row[first] != split_of_row[second]]]).sum()
    pairs = sorted(map(sorted, zip(first[differs].tolist(), second[differs].tolist(), strict=True)))
    examples = [" and ".join(_shown(rows, number) for number in pair) for pair in pairs[:MAX_EXAMPLES]]
    over_splits = f", {in_several:,} of them over several splits" if in_several else ""
    count, of = len(texts), len(keys) - len(same)
    share = f"{100 * count / of:.3g}%"  # of few texts too
    note = f"{count:,} of {of:,} texts ({share}) have several labels{over_splits}, such as {''.join(examples[:1])}."
    return Finding("conflicting_labels", count, of, note, None, examples)


def _codes(labels: Sequence[pa.ChunkedArray], problem_type: str | None) -> npt.NDArray[np.int64]:
    """A number for each row, equal where the labels are."""
    of_all = pa.chunked_array([chunk for column in labels for chunk in column.chunks], pa.string())
    written = of_all.unique()
    names = [" ".join(sorted(parts(each))) if problem_type == MULTI_LABEL else each for each in written.to_pylist()]
    codes = pa.array(names, pa.string()).dictionary_encode().indices.to_numpy()
    of_rows: npt.NDArray[np.int64] = codes[pc.index_in(of_all, value_set=written).to_numpy()]
    return of_rows


def _shown(splits: Sequence[StoredRows], number: int) -> str:
    """Where a row of all splits, counted through, stands, with its label."""
    for rows in splits:
        if number < len(rows):
            break
        number -= len(rows)
    return f"{rows.location(number)} ({shortened(rows.table['label'][number].as_py())})"


def near_duplicates(train: Mapping[int, str], held_out: Mapping[int, str]) -> dict[int, int]:
    """The numbers of the held-out texts that a training text resembles -> the number of the most similar one.

    Case, punctuation, handles, links and a few letters may differ. Texts that stand in the training rows as they are,
    and those below 20 letters, are left out.
    """
    from rensa import RMinHashLSH  # only for runs whose health is measured

    mine, index = _long_enough(held_out), RMinHashLSH(_SIMILAR, _HASHES, _BANDS)
    for number, hashes in zip(mine, _hashes(mine), strict=True):
        index.insert(number, hashes)
    best: dict[int, tuple[float, int]] = {}
    same: set[int] = set()
    left = iter(train.items())
    while some := dict(islice(left, _AT_ONCE)):
        theirs = _long_enough(some)
        for row, found in zip(theirs, index.query_all(_hashes(theirs)), strict=True):
            same.update(number for number in found if train[row] == held_out[number])
            for number in found:
                similarity = _similarity(theirs[row], mine[number])
                if similarity >= _SIMILAR and (number not in best or similarity > best[number][0]):
                    best[number] = similarity, row
    return {number: best[number][1] for number in sorted(best.keys() - same)}


def near_groups(texts: Iterable[str]) -> npt.NDArray[np.int64]:
    """The number of each text's group, int64 [texts]: equal texts, and those that resemble one of their group.

    Texts resemble each other as in `near_duplicates`.
    """
    from rensa import RMinHashLSH
    from scipy.sparse import dok_array
    from scipy.sparse.csgraph import connected_components

    numbers = dict[str, int]()
    of_row = [numbers.setdefault(text, len(numbers)) for text in texts]
    index, shingles = RMinHashLSH(_SIMILAR, _HASHES, _BANDS), _long_enough(dict(enumerate(numbers)))
    hashes, graph = _hashes(shingles), dok_array((len(numbers), len(numbers)), dtype=np.bool_)
    for number, each in zip(shingles, hashes, strict=True):
        index.insert(number, each)
    for number, others in zip(shingles, index.query_all(hashes), strict=True):
        for other in others:
            graph[number, other] = _similarity(shingles[number], shingles[other]) >= _SIMILAR
    groups: npt.NDArray[np.int64] = connected_components(graph.tocsr(), directed=False)[1].astype(np.int64)
    return groups[of_row]


def _similarity(first: set[str], second: set[str]) -> float:
    return len(first & second) / len(first | second)


def _long_enough(texts: Mapping[int, str]) -> dict[int, set[str]]:
    """The shingles of the texts that are not too short."""
    found = {}
    for number, text in texts.items():
        letters = _BETWEEN_WORDS.sub(" ", text.casefold()).strip()
        if len(letters) >= _MIN_LETTERS:
            found[number] = {letters[at : at + _SHINGLE] for at in range(len(letters) - _SHINGLE + 1)}
    return found


def _hashes(texts: Mapping[int, set[str]]) -> list[RMinHash]:
    from rensa import RMinHash

    return list(RMinHash.from_token_sets(texts.values(), _HASHES, _SEED))


_OF_NO_CLASS = "(unknown|unk|unsure|unlabell?ed|undefined|undetermined|none|null|nan|n/?a)(?![^\\W_])"
NO_CLASS, _NO_CLASS = (re.compile(each, re.IGNORECASE) for each in (_OF_NO_CLASS, f"{_OF_NO_CLASS}|not[-_ ]"))
_FEW_ROWS = 20
_FEW_SHARE = 0.005
_MAX_LISTED = 5
# Of the rows. Rarer ones, such as "happy" as the first word, may be what the label means.
_MIN_SHARE, _MIN_ROWS = 0.02, 50
_SHOWN, _WARNS = 0.1, 0.25  # above the label's share of all rows
_SIGMAS = 4  # and above what chance would give
_WORDS = ("first word ", "last word ")
_LENGTHS = (25, 50, 100, 200, 400)


def label_balance(rows: pa.Table, problem_type: str | None) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Rows of each language and label with their share of the language's rows; and the labels that name no class."""
    of_language, of_both = Counter[str](), Counter[tuple[str, str]]()
    for group in rows.group_by(["language", "label"]).aggregate([([], "count_all")]).to_pylist():
        of_language[group["language"]] += group["count_all"]
        for label in names([group["label"]], problem_type):
            of_both[group["language"], label] += group["count_all"]
    counts, whole, found = Counter[str](), len(rows), list[Finding]()
    for (_, label), count in sorted(of_both.items()):
        counts[label] += count
    for label in filter(_NO_CLASS.match, counts):
        note = (
            f"Label {shortened(label)} ({counts[label]:,} rows, {counts[label] / whole:.1%}) seems to name no class. "
            f"The model learns to predict it. {shlex.quote(f'--label_map={label}=')} leaves these rows out."
        )
        found.append(Finding("labels_of_no_class", counts[label], whole, note, None, [label]))
    return shares_of_languages(of_both, of_language), found


def shares_of_languages(of_both: Counter[tuple[str, str]], of_language: Counter[str]) -> list[dict[str, Any]]:
    """The count of each language and label, and its share of what is counted of the language."""
    return [
        {"language": language, "label": label, "count": count, "share": count / of_language[language]}
        for (language, label), count in sorted(of_both.items())
    ]


def rare_labels(train: StoredRows, problem_type: str | None) -> list[str]:
    """A sentence for each of the first few rare labels, and one for the others.

    They have less than 0.5% of the rows, or less than 20 rows if some label has more.
    """
    if problem_type == REGRESSION:
        return []
    counts = label_counts(train, problem_type)
    limit = max(_FEW_SHARE * len(train), _FEW_ROWS if max(counts.values()) >= _FEW_ROWS else 0)
    rare = sorted((label for label, count in counts.items() if count < limit), key=lambda label: counts[label])
    usual = {label: count for label, count in counts.items() if count >= limit}
    notes = []
    for label in rare[:_MAX_LISTED]:
        rows = f"{counts[label]} of {len(train):,} rows have label {shortened(label)}"
        near = difflib.get_close_matches(label, usual, n=1)
        meant = "; they teach little."
        if near:
            joins = f"--label_map {shlex.quote(f'{label}={near[0]}')} joins them."
            meant = f"; is it {shortened(near[0])} ({usual[near[0]]:,} rows)? {joins}"
        notes.append(f"{rows}, first {first_location(train, label, problem_type)}{meant}")
    if len(rare) > _MAX_LISTED:
        notes.append(f"{len(rare) - _MAX_LISTED} more labels are as rare.")
    return [f"{train.origin} {train.source}: {note}" for note in notes]


def label_sources(rows: Iterable[tuple[str, Mapping[str, str], Sequence[str]]]) -> list[Finding]:
    """`label_sources`: what is common to many rows, and raises the share of one label by 10 percentage points or more.

    `rows` has the text, what is known of its source by name (such as `language`), and the labels of each.
    """
    labels: Counter[str] = Counter()
    of_feature: defaultdict[str, Counter[str]] = defaultdict(Counter)
    with_feature: Counter[str] = Counter()
    number = 0
    for text, source, given in rows:
        number += 1
        labels.update(given)
        for feature in {*_features(text), *(f"{name} {value}" for name, value in source.items())}:
            with_feature[feature] += 1
            of_feature[feature].update(given)
    found = []
    for feature, count in with_feature.items():
        if count == number or count < max(_MIN_ROWS, _MIN_SHARE * number):
            continue
        shown = f"the same {feature.split()[0]} word" if feature.startswith(_WORDS) else feature
        for label, both in of_feature[feature].items():
            usual = labels[label] / number
            above = both / count - usual
            if above >= max(_SHOWN, _SIGMAS * (usual * (1 - usual) / count) ** 0.5):
                note = (
                    f"{both / count:.0%} of the {count:,} rows with {shown} have label "
                    f"{shortened(label)}, but {usual:.0%} of all rows do. Check that the label follows the text, not "
                    "its source."
                )
                example = f"{feature} -> {label}"
                found.append((above, Finding("label_sources", both, count, note, None, [example], above >= _WARNS)))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]


def _features(text: str) -> Iterator[str]:
    words = text.replace(BETWEEN_TEXTS, " ").split()
    for where, word in zip(_WORDS, (words[0], words[-1]), strict=True):
        yield f'{where}"{word.casefold()}"'
    for placeholder in (HANDLE_PLACEHOLDER, URL_PLACEHOLDER):
        if placeholder in words:
            yield placeholder
    bounds = zip((0, *_LENGTHS), (*_LENGTHS, None), strict=True)
    shortest, longest = next(each for each in bounds if each[1] is None or len(text) < each[1])
    yield f"{shortest} characters or more" if longest is None else f"{shortest} to {longest - 1} characters"
