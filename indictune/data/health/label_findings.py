"""Find labels that few rows have, that name no class, or that follow the source of a row."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from indictune.data.columns import shortened
from indictune.data.health.findings import Finding
from indictune.data.labels import REGRESSION, first_location, label_counts, names
from indictune.data.rows import StoredRows
from indictune.data.text.cleaning import HANDLE_PLACEHOLDER, URL_PLACEHOLDER

_NO_CLASS = re.compile(
    "(unknown|unk|unsure|unlabell?ed|undefined|undetermined|none|null|nan|n/?a)(?![^\\W_])|not[-_ ]", re.IGNORECASE
)
_FEW_ROWS = 20
_FEW_SHARE = 0.005
_MAX_LISTED = 5
# Of the rows. Rarer ones, such as "happy" as the first word, may be what the label means.
_MIN_SHARE, _MIN_ROWS = 0.02, 50
_SHOWN, _WARNS = 0.1, 0.25  # above the label's share of all rows
_SIGMAS = 4  # and above what chance would give
_WORDS = ("first word ", "last word ")
_LENGTHS = (25, 50, 100, 200, 400)


def label_balance(rows: pa.Table, problem_type: str | None) -> list[dict[str, Any]]:
    """Rows of each language and label, and their share of the language's rows."""
    groups = (
        rows.select(["language", "label"]).group_by(["language", "label"]).aggregate([([], "count_all")]).to_pylist()
    )
    of_language: dict[str, int] = {}
    of_both: dict[tuple[str, str], int] = {}
    for group in groups:
        language, count = group["language"], group["count_all"]
        of_language[language] = of_language.get(language, 0) + count
        for label in names([group["label"]], problem_type):
            of_both[language, label] = of_both.get((language, label), 0) + count
    return [
        {"language": language, "label": label, "count": count, "share": count / of_language[language]}
        for (language, label), count in sorted(of_both.items())
    ]


def labels_of_no_class(balance: Sequence[Mapping[str, Any]], rows: int) -> Iterator[Finding]:
    """Labels whose names say that a row has no class, such as `unknown`; `rows` were counted in `balance`."""
    counts: dict[str, int] = {}
    for each in balance:
        counts[each["label"]] = counts.get(each["label"], 0) + each["count"]
    for label, count in counts.items():
        if _NO_CLASS.match(label):
            note = (
                f"Label {shortened(label)} ({count:,} rows, {count / rows:.1%}) seems to name no class. "
                "The model learns to predict it. Leave these rows out if you do not mean that."
            )
            yield Finding("labels_of_no_class", count, rows, note, None, [label])


def rare_labels(train: StoredRows, problem_type: str | None) -> list[str]:
    """A sentence for each of the first few rare labels, and one for the others.

    A label is rare below 0.5% of the rows, or below 20 rows. In a small set, where no label has 20, only the share
    counts.
    """
    if problem_type == REGRESSION:
        return []
    counts = label_counts(train, problem_type)
    limit = _FEW_SHARE * len(train)
    if max(counts.values()) >= _FEW_ROWS:
        limit = max(limit, _FEW_ROWS)
    rare = sorted((label for label, count in counts.items() if count < limit), key=lambda label: counts[label])
    usual = {label: count for label, count in counts.items() if count >= limit}
    notes = []
    for label in rare[:_MAX_LISTED]:
        rows = f"{counts[label]} of {len(train):,} rows have label {shortened(label)}"
        near = difflib.get_close_matches(label, usual, n=1)
        meant = f"; is it {shortened(near[0])} ({usual[near[0]]:,} rows)?" if near else "; they teach little."
        notes.append(
            f"{train.origin} {train.source}: {rows}, first {first_location(train, label, problem_type)}{meant}"
        )
    if len(rare) > _MAX_LISTED:
        notes.append(f"{train.origin} {train.source}: {len(rare) - _MAX_LISTED} more labels are as rare.")
    return notes


def label_sources(rows: Iterable[tuple[str, Mapping[str, str], Sequence[str]]]) -> list[Finding]:
    """`label_sources`: what is common to many rows, and raises the share of one label by 10 percentage points or more.

    Args:
        rows: text, what is known of its source by name (such as `language`), and labels of each.
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
        for label, both in of_feature[feature].items():
            usual = labels[label] / number
            above = both / count - usual
            if above >= max(_SHOWN, _SIGMAS * (usual * (1 - usual) / count) ** 0.5):
                note = (
                    f"{both / count:.0%} of the {count:,} rows with {_without_word(feature)} have label "
                    f"{shortened(label)}, but {usual:.0%} of all rows do. Check that the label follows the text, not "
                    "its source."
                )
                example = f"{feature} -> {label}"
                found.append((above, Finding("label_sources", both, count, note, None, [example], above >= _WARNS)))
    return [each for _, each in sorted(found, key=lambda pair: -pair[0])]


def _without_word(feature: str) -> str:
    """A feature without the word of a row that it names."""
    return f"the same {feature.split()[0]} word" if feature.startswith(_WORDS) else feature


def _features(text: str) -> Iterator[str]:
    words = text.split()
    for where, word in zip(_WORDS, (words[0], words[-1]), strict=True):
        yield f'{where}"{word.casefold()}"'
    for placeholder in (HANDLE_PLACEHOLDER, URL_PLACEHOLDER):
        if placeholder in words:
            yield placeholder
    bounds = zip((0, *_LENGTHS), (*_LENGTHS, None), strict=True)
    shortest, longest = next(each for each in bounds if each[1] is None or len(text) < each[1])
    yield f"{shortest} characters or more" if longest is None else f"{shortest} to {longest - 1} characters"
