"""The results in a model card: scores for whom, with intervals where `evaluation.json` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from indictune.evaluation.breakdown import SPLITS, Breakdown, Group
from indictune.evaluation.intervals import Estimate
from indictune.hub.card_facts import Facts
from indictune.hub.card_metadata import scores_in
from indictune.hub.public_text import Verbatim, table

_SHOWN = ("language", "script", "length")  # groups, in this order
_RATIOS = ("precision", "recall", "f1")


def results_in(facts: Facts) -> dict[str, Any]:
    """What the template says of results: a table a split, and the language with the worst score."""
    splits = list[dict[str, Any]]()
    for key, name in SPLITS.items():
        breakdown, block = facts.breakdowns.get(key), facts.metrics.get(key)
        if breakdown is not None:
            labels, written = _labels(breakdown.overall), breakdown.written and _groups(breakdown.written)
            more = {"labels": labels, "calibration": breakdown.calibration, "written": written}
            splits.append({"name": name, "table": _groups(breakdown)} | more)
        elif block:
            splits.append(
                {"name": name, "table": _scores(block), "labels": None, "calibration": None, "written": None}
            )
    first = next((facts.breakdowns[key] for key in SPLITS if key in facts.breakdowns), None)
    return {
        "splits": splits,
        "worst": first and _worst(first),
        "intervals": first is not None,
        "baseline": facts.baseline,
    }


def _worst(breakdown: Breakdown) -> dict[str, str] | None:
    """The language with the worst main score, if there are several."""
    languages, worst = breakdown.by["language"], breakdown.worst_language
    if len(languages) < 2:
        return None
    value = languages[worst].scores[breakdown.score].value
    rank = "highest" if breakdown.lower_is_better else "lowest"
    return {"language": worst, "name": breakdown.score.replace("_", " "), "value": f"{value:.4f}", "rank": rank}


def _groups(breakdown: Breakdown) -> Verbatim:
    """Scores of all rows and of each group. A group that all rows are in is left out."""
    names = list(breakdown.overall.scores)
    body = [[f"{what} {value}", *_row(group, names)] for what, value, group in _listed(breakdown)]
    header = ["", "rows", *(name.replace("_", " ") for name in names)]
    return table(header, [["all", *_row(breakdown.overall, names)], *body])


def _listed(breakdown: Breakdown) -> Iterator[tuple[str, str, Group]]:
    for what in _SHOWN:
        groups = breakdown.by.get(what) or {}
        yield from ((what, value, group) for value, group in groups.items() if len(groups) > 1)


def _row(group: Group, names: list[str]) -> list[str]:
    return [f"{group.num_examples:,}", *(_estimate(group.scores[name]) for name in names)]


def _labels(group: Group) -> Verbatim | None:
    """Scores of each label, or of each kind of entity."""
    if not group.per_label:
        return None
    body = [
        [label, f"{scores.support:,}", *(_estimate(getattr(scores, name)) for name in _RATIOS)]
        for label, scores in group.per_label.items()
    ]
    return table(["label", "rows", *_RATIOS], body)


def _estimate(score: Estimate) -> str:
    return f"{score.value:.4f} ({score.low:.4f} to {score.high:.4f})"


def _scores(block: Mapping[str, Any]) -> Verbatim:
    """Scores of all rows and of each language in a block of `metrics.json`, for a task without `evaluation.json`."""
    languages: Mapping[str, Any] = block.get("per_language") or {}
    names = [name for name, _ in scores_in(block)]
    body = []
    for of, scores in (("all", block), *((f"language {name}", scores) for name, scores in languages.items())):
        known = dict(scores_in(scores))
        count = f"{scores.get('num_examples', 0):,}"
        body.append([of, count, *(f"{known[name]:.4f}" if name in known else "" for name in names)])
    return table(["", "rows", *(name.replace("_", " ") for name in names)], body)
