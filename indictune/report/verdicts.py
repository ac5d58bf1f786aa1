"""What a report says in sentences: how good the model is, whom it fails, a baseline, findings, and worst mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from indictune.evaluation.breakdown import SPLITS
from indictune.hub.card_facts import with_interval
from indictune.hub.public_text import without_folders
from indictune.report.report_tables import DIGITS, titled
from indictune.report.reported_run import ReportedRun

_MOST_MISTAKES = 30
_ABOUT = {
    "answers": "The answers of each language with the largest loss.",
    "regression": "The rows of each language whose number is furthest off.",
    "entities": "The sentences of each language with the most wrong tags.",
}
_SURE = "The rows of each language that the model gets wrong and is most sure of. Some may have a wrong label."
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[A-Z][a-z]{3})?")  # BCP 47
_MOST_TAGS = 8


@dataclass(frozen=True)
class Verdict:
    """A short statement with its reason. `kind` is how it is to be taken."""

    title: str
    reason: str
    kind: Literal["fact", "good", "warning"] = "fact"


def verdicts_of(run: ReportedRun) -> Iterator[Verdict]:
    """The statements at the top of a report."""
    breakdown = run.breakdown
    if breakdown is not None:
        name = titled(breakdown.score)
        overall, languages = breakdown.overall, breakdown.by["language"]
        rows = f"{overall.num_examples:,} {SPLITS[run.split]} rows; in brackets the 95% interval."
        yield Verdict(f"{name} {with_interval(overall.scores[breakdown.score], DIGITS)}", f"On {rows}")
        if len(languages) > 1:
            worst = languages[breakdown.worst_language]
            reason = f"{name} {with_interval(worst.scores[breakdown.score], DIGITS)}, on {worst.num_examples:,} rows."
            yield Verdict(f"Worst language: {breakdown.worst_language}", reason)
    if (against := against_baseline(run)) is not None:
        yield against
    if breakdown is not None and (sure := breakdown.calibration) is not None:
        after = ""
        if sure.temperature is not None:
            after = f" With predict --calibrated it is {sure.calibrated_ece:.3f} (temperature {sure.temperature:.2f})."
        yield Verdict(f"Calibration error {sure.ece:.3f}", f"Mean distance of confidence and accuracy.{after}")


def findings_of(run: ReportedRun, texts: bool) -> Iterator[tuple[Verdict, list[str]]]:
    """What was found in the rows, warnings first, with examples, which are texts of the rows."""
    for each in sorted(run.health.get("findings") or [], key=lambda each: not each.get("warns")):
        where = f" ({each['language']})" if each.get("language") else ""
        kind: Literal["fact", "warning"] = "warning" if each.get("warns") else "fact"
        examples = [without_folders(str(example)) for example in each.get("examples") or []]
        title = f"{titled(str(each['name']))}{where}"
        yield Verdict(title, without_folders(str(each.get("note") or "")), kind), examples if texts else []


def against_baseline(run: ReportedRun) -> Verdict | None:
    """Whether the model is better than the baseline by more than chance; None without a baseline."""
    found: Mapping[str, Any] = run.facts.baseline.get("overall") or {}
    if not found.get("difference"):
        return None
    first, second, gap = found["first"], found["second"], found["difference"]
    both = f"Macro-F1: model {second:.3f}, baseline {first:.3f}."
    interval = f"The 95% interval of the difference is {gap['low']:+.3f} to {gap['high']:+.3f}"
    if gap["low"] <= 0 <= gap["high"]:
        reason = f"{both} {interval}, which includes 0: the difference may be chance."
        return Verdict("A tie with the baseline", reason, "warning")
    reason = f"{both} {interval}, which excludes 0."
    if gap["high"] < 0:
        return Verdict("Worse than the baseline", reason, "warning")
    if _covers(run, first):
        reason += " But the interval of the model's own score contains the baseline's: more rows would tell."
        return Verdict("Hardly better than the baseline", reason, "warning")
    return Verdict("Better than the baseline", reason, "good")


def _covers(run: ReportedRun, score: float) -> bool:
    """Whether the interval of the model's macro-F1 contains a score."""
    breakdown = run.breakdown
    if breakdown is None or "macro_f1" not in breakdown.overall.scores:
        return False
    own = breakdown.overall.scores["macro_f1"]
    return own.low <= score <= own.high


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


def mistakes_of(run: ReportedRun) -> list[Mistake]:
    """The worst rows of the split that the report is about, of all languages in turn."""
    rows = run.mistakes.get(run.split) or []
    by_language: dict[str, int] = {}
    ranked = []
    for at, row in enumerate(rows):
        rank = by_language[row["language"]] = by_language.get(row["language"], 0) + 1
        ranked.append((rank, at, row))
    chosen = sorted(sorted(ranked, key=lambda each: each[:2])[:_MOST_MISTAKES], key=lambda each: each[1])
    kind = "" if run.breakdown is None else run.breakdown.kind
    return [_mistake(kind, row) for _, _, row in chosen]


def about_mistakes(run: ReportedRun) -> str:
    """What the rows have in common."""
    return _SURE if run.breakdown is None else _ABOUT.get(run.breakdown.kind, _SURE)


def _mistake(kind: str, row: Mapping[str, Any]) -> Mistake:
    right, predicted, how_wrong = _compared(kind, row)
    language, where = str(row["language"]), str(row.get("row") or "").replace("\\", "/").rpartition("/")[2]
    return Mistake(str(row["text"]), _browser_language(language, row.get("script")), where, language, right,
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


def _browser_language(language: str, script: str | None) -> str:
    """The `lang` of an element, or nothing for a name that is no code."""
    if not _LANGUAGE.fullmatch(language):
        return ""
    return f"{language}-Latn" if script == "romanised" and "-" not in language else language
