"""Count the labels of each language, and name labels that stand for no class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from indictune.data.columns import shortened
from indictune.data.findings import Finding
from indictune.data.labels import names

_NO_CLASS = re.compile(
    "(unknown|unk|unsure|unlabell?ed|undefined|undetermined|none|null|nan|n/?a)(?![^\\W_])|not[-_ ]", re.IGNORECASE
)


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
