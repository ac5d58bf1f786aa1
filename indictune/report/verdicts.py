"""What a report says in sentences: how good the model is, for whom it is worst, and whether a baseline is as good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from indictune.evaluation.breakdown import SPLITS
from indictune.hub.public_text import without_folders
from indictune.report.run_facts import RunFacts
from indictune.report.tables import shown, titled


@dataclass(frozen=True)
class Verdict:
    """A short statement with its reason. `kind` is how it is to be taken."""

    title: str
    reason: str
    kind: Literal["fact", "good", "warning"] = "fact"


def verdicts(run: RunFacts) -> Iterator[Verdict]:
    """The statements at the top of a report."""
    breakdown = run.breakdown
    if breakdown is not None:
        name = titled(breakdown.score)
        overall, languages = breakdown.overall, breakdown.by["language"]
        rows = f"{overall.num_examples:,} {SPLITS[run.split]} rows; in brackets the 95% interval."
        yield Verdict(f"{name} {shown(overall.scores[breakdown.score])}", f"On {rows}")
        if len(languages) > 1:
            worst = languages[breakdown.worst_language]
            reason = f"{name} {shown(worst.scores[breakdown.score])}, on {worst.num_examples:,} rows."
            yield Verdict(f"Worst language: {breakdown.worst_language}", reason)
    if (against := against_baseline(run)) is not None:
        yield against
    if breakdown is not None and (sure := breakdown.calibration) is not None:
        after = ""
        if sure.temperature is not None:
            after = f" With predict --calibrated it is {sure.calibrated_ece:.3f} (temperature {sure.temperature:.2f})."
        yield Verdict(f"Calibration error {sure.ece:.3f}", f"Mean distance of confidence and accuracy.{after}")


def findings(run: RunFacts, texts: bool) -> Iterator[tuple[Verdict, list[str]]]:
    """What was found in the rows, warnings first, with examples, which are texts of the rows."""
    for each in sorted(run.health.get("findings") or [], key=lambda each: not each.get("warns")):
        where = f" ({each['language']})" if each.get("language") else ""
        kind: Literal["fact", "warning"] = "warning" if each.get("warns") else "fact"
        examples = [without_folders(str(example)) for example in each.get("examples") or []]
        title = f"{titled(str(each['name']))}{where}"
        yield Verdict(title, without_folders(str(each.get("note") or "")), kind), examples if texts else []


def against_baseline(run: RunFacts) -> Verdict | None:
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


def _covers(run: RunFacts, score: float) -> bool:
    """Whether the interval of the model's macro-F1 contains a score."""
    breakdown = run.breakdown
    if breakdown is None or "macro_f1" not in breakdown.overall.scores:
        return False
    own = breakdown.overall.scores["macro_f1"]
    return own.low <= score <= own.high
