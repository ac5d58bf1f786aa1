"""Make the HTML of a report: of one run, or of several that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from indictune.hub.public_text import harmless
from indictune.report import pictures, tables
from indictune.report.mistake_rows import about_mistakes, mistakes_of
from indictune.report.run_facts import RunFacts
from indictune.report.theme import Picture, drawing
from indictune.report.verdicts import findings, verdicts

_MOST_ANSWERS = 10


@dataclass(frozen=True)
class Page:
    """A page, and its pictures."""

    html: str
    pictures: list[Picture]


def page_of(run: RunFacts, texts: bool = True) -> Page:
    """The report of a run.

    Args:
        run: to show.
        texts: show texts of the rows.
    """
    breakdown = run.breakdown
    with drawing():
        curves, languages = list(pictures.curves([run])), pictures.languages([run])
        matrix = None if breakdown is None else pictures.confusion(breakdown)
        sure = None if breakdown is None or breakdown.calibration is None else breakdown.calibration
        reliability = None if sure is None else pictures.reliability(sure)
    found, data = list(findings(run, texts)), run.facts.metrics.get("data") or {}
    chosen, others = tables.settings(run.facts)
    html = _rendered(
        "run.html.jinja",
        title=run.name,
        run=run,
        verdicts=list(verdicts(run)),
        curves=curves,
        languages=languages,
        scores=tables.scores(run),
        matrices=[] if breakdown is None else tables.matrices(breakdown),
        all_languages=0 if breakdown is None else len(breakdown.by["language"]),
        reliability=reliability,
        about_mistakes=about_mistakes(run),
        mistakes=mistakes_of(run) if texts else [],
        hidden_mistakes=0 if texts else len(mistakes_of(run)),
        answers=run.answers[:_MOST_ANSWERS] if texts else [],
        data=tables.data(run.facts),
        notes=[note for note in data.get("notes") or [] if note not in {each.reason for each, _ in found}],
        health=tables.health(run),
        findings=found,
        baseline=run.facts.baseline,
        chosen=chosen,
        others=others,
        command=run.facts.command if run.facts.chosen else "",
        environment=tables.environment(run.facts),
    )
    return Page(html, [each for each in (*curves, languages, matrix, reliability) if each is not None])


def comparison_of(runs: Sequence[RunFacts]) -> Page:
    """The page that compares runs."""
    with drawing():
        curves, languages = list(pictures.curves(runs)), pictures.languages(runs)
    html = _rendered(
        "runs.html.jinja",
        title=", ".join(run.name for run in runs),
        runs=[(run, list(verdicts(run))) for run in runs],
        curves=curves,
        languages=languages,
        scores=tables.compared_scores(runs),
        settings=tables.compared_settings(runs),
        environment=tables.compared_environments(runs),
    )
    return Page(html, [*curves, *([languages] if languages else [])])


def _rendered(template: str, **content: Any) -> str:
    """A page. All that is not our own markup is escaped, and loses its tokens and control characters."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else harmless(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)
