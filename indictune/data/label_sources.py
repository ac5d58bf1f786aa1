"""Find labels that go with the source of a row: its first word, file, language or length says the label."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from indictune.data.columns import shortened
from indictune.data.findings import Finding
from indictune.data.text.cleaning import HANDLE_PLACEHOLDER, URL_PLACEHOLDER

# Of the rows. Rarer ones, such as "happy" as the first word, may be what the label means.
_MIN_SHARE, _MIN_ROWS = 0.02, 50
_SHOWN, _WARNS = 0.1, 0.25  # above the label's share of all rows
_SIGMAS = 4  # and above what chance would give
_WORDS = ("first word ", "last word ")
_LENGTHS = (25, 50, 100, 200, 400)


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
