"""Labels that go with the source of a row, and labels that name no class."""

from __future__ import annotations

import pyarrow as pa
import pytest

from indictune.data.health.findings import Finding, label_balance, label_sources

LABELS = ("negative", "neutral", "positive")


def found(texts: list[str], labels: list[str], **source: list[str]) -> list[Finding]:
    sources = [dict(zip(source, values, strict=True)) for values in zip(*source.values(), strict=True)] or [{}] * len(
        texts
    )
    return label_sources((text, each, [label]) for text, each, label in zip(texts, sources, labels, strict=True))


def rows(number: int) -> tuple[list[str], list[str]]:
    """Texts that say nothing of their labels."""
    return [f"w{index % 7} a b c" for index in range(number)], [LABELS[index % 3] for index in range(number)]


def test_a_prefix_of_one_label_is_found() -> None:
    texts, labels = rows(600)
    texts = [
        f"RT {text}" if label == "neutral" and row % 5 else text
        for row, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]
    (first, *_) = found(texts, labels)
    assert first.examples == ['first word "rt" -> neutral']
    assert (first.count, first.of, first.warns) == (160, 160, True)


@pytest.mark.parametrize("place", ["{} @user", "http {}", "{} last"])
def test_a_handle_a_link_and_a_last_word_are_found(place: str) -> None:
    texts, labels = rows(300)
    texts = [place.format(text) if label == "positive" else text for text, label in zip(texts, labels, strict=True)]
    assert any(each.examples[0].endswith("-> positive") and each.share == 1 for each in found(texts, labels))


def test_a_file_a_language_and_a_length_are_found() -> None:
    texts, labels = rows(300)
    files = [f"{label}.csv" for label in labels]
    languages = ["te" if label == "neutral" or row % 2 else "hi" for row, label in enumerate(labels)]
    texts = [text + " x" * 30 * (label == "negative") for text, label in zip(texts, labels, strict=True)]
    examples = [each.examples[0] for each in found(texts, labels, file=files, language=languages)]
    assert {"file neutral.csv -> neutral", "50 to 99 characters -> negative"} <= set(examples)
    assert any(each.startswith("language te -> neutral") for each in examples)


def test_what_says_little_or_is_rare_is_not() -> None:
    texts, labels = rows(3_000)
    assert found(texts, labels) == []
    texts[:40] = ["happy day"] * 40  # a word, not a source
    labels[:40] = ["positive"] * 40
    assert found(texts, labels) == []
    assert found(texts, ["positive"] * 3_000) == []


def test_what_says_something_is_listed_without_a_warning() -> None:
    texts, labels = rows(3_000)
    texts = [
        f"RT {text}" if row % 2 and label != "negative" else text
        for row, (text, label) in enumerate(zip(texts, labels, strict=True))
    ]
    listed = found(texts, labels)
    assert listed
    assert not any(each.warns for each in listed)


def test_labels_are_counted_by_language() -> None:
    table = pa.table({"language": ["hi", "hi", "te", "hi"], "label": ["a", "b", "b", "a"], "line": [1, 2, 3, 4]})
    assert label_balance(table, None)[0] == [
        {"language": "hi", "label": "a", "count": 2, "share": 2 / 3},
        {"language": "hi", "label": "b", "count": 1, "share": 1 / 3},
        {"language": "te", "label": "b", "count": 1, "share": 1.0},
    ]
    several = pa.table({"language": ["hi", "hi"], "label": ["a|b", "b"]})
    assert [each["count"] for each in label_balance(several, "multi_label_classification")[0]] == [1, 2]


@pytest.mark.parametrize(
    ("label", "is_found"),
    [
        *((label, True) for label in ("unknown_state", "Unknown", "not-Tamil", "N/A", "none", "unlabeled")),
        *((label, False) for label in ("neutral", "notable", "nonetheless", "unkind", "nanny", "0", "mixed")),
    ],
)
def test_labels_that_name_no_class(label: str, is_found: bool) -> None:
    table = pa.table({"language": ["hi", "te"] * 6, "label": [label] * 6 + ["mood"] * 6})
    _, listed = label_balance(table, None)
    assert [(each.count, each.of, each.examples) for each in listed] == [(6, 12, [label])] * is_found
