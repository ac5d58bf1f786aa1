"""The most confident mistakes of a model, ready for a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from indictune.report.run_facts import RunFacts

_MOST = 30
_ABOUT = {
    "answers": "The answers of each language with the largest loss.",
    "regression": "The rows of each language whose number is furthest off.",
    "entities": "The sentences of each language with the most wrong tags.",
}
_SURE = "The rows of each language that the model gets wrong and is most sure of. Some may have a wrong label."
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Z][a-z]{3})?")  # BCP 47
_MOST_TAGS = 8


@dataclass(frozen=True)
class Mistake:
    """A row that the model gets wrong.

    Attributes:
        text: of the row.
        lang: its language for a browser, or empty.
        where: its file and line, without the folder.
        language: as the rows name it.
        right: label, labels, number or tags; empty for a language model.
        predicted: likewise.
        how_wrong: how sure the model was, or how far off.
    """

    text: str
    lang: str
    where: str
    language: str
    right: str
    predicted: str
    how_wrong: str


def mistakes_of(run: RunFacts) -> list[Mistake]:
    """The worst rows of the split that the report is about, of all languages in turn."""
    rows = run.mistakes.get(run.split) or []
    by_language: dict[str, int] = {}
    ranked = []
    for at, row in enumerate(rows):
        rank = by_language[row["language"]] = by_language.get(row["language"], 0) + 1
        ranked.append((rank, at, row))
    chosen = sorted(sorted(ranked, key=lambda each: each[:2])[:_MOST], key=lambda each: each[1])
    kind = "" if run.breakdown is None else run.breakdown.kind
    return [_mistake(kind, row) for _, _, row in chosen]


def about_mistakes(run: RunFacts) -> str:
    """What the rows have in common."""
    return _SURE if run.breakdown is None else _ABOUT.get(run.breakdown.kind, _SURE)


def _mistake(kind: str, row: Mapping[str, Any]) -> Mistake:
    right, predicted, how_wrong = _compared(kind, row)
    language, where = str(row["language"]), str(row.get("row") or "").replace("\\", "/").rpartition("/")[2]
    return Mistake(str(row["text"]), browser_language(language, row.get("script")), where, language, right,
                   predicted, how_wrong)  # fmt: skip


def _compared(kind: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What is right, what the model says, and how wrong that is."""
    wrong = float(row["wrongness"])
    if kind == "answers":
        return "", "", f"{wrong:.2f} nats a token"
    right, predicted = row["label"], row["predicted"]
    if kind == "regression":
        return f"{right:.3g}", f"{predicted:.3g}", f"{wrong:.3g} off"
    if kind == "entities":
        return *_tags(row["text"].split(" "), right, predicted), f"{wrong:.0f} tags"
    if kind == "multi_label":
        return ", ".join(right) or "none", ", ".join(predicted) or "none", f"{wrong:.0%} sure"
    return str(right), str(predicted), f"{wrong:.0%} sure"


def _tags(words: Sequence[str], right: Sequence[str], predicted: Sequence[str]) -> tuple[str, str]:
    """The words whose tags differ, with the right tags and with the predicted ones."""
    each = [triple for triple in zip(words, right, predicted, strict=False) if triple[1] != triple[2]][:_MOST_TAGS]
    return ", ".join(f"{word} {tag}" for word, tag, _ in each), ", ".join(f"{word} {tag}" for word, _, tag in each)


def browser_language(language: str, script: str | None) -> str:
    """The `lang` of an element, or nothing for a name that is no code."""
    if not _LANGUAGE.fullmatch(language):
        return ""
    return f"{language}-Latn" if script == "romanised" and "-" not in language else language
