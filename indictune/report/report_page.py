"""Write the report of a run, or of several that are compared: a page of HTML and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from indictune.evaluation.mistakes import MISTAKES
from indictune.files import HEALTH, SAMPLES, write_whole
from indictune.hub.public_text import harmless
from indictune.report import pictures, report_tables
from indictune.report.pictures import Picture, drawing
from indictune.report.reported_run import ReportedRun, read_run
from indictune.report.verdicts import about_mistakes, findings_of, mistakes_of, verdicts_of

REPORT = "report.html"
FIGURES = "figures"
_TEXTS = (MISTAKES, HEALTH, SAMPLES)  # whose texts of rows a report shows
_MOST_ANSWERS = 10


def write_report(folders: Sequence[Path], file: Path | None = None, texts: bool = True) -> Path:
    """Write a page and its pictures; returns the page's path.

    Args:
        folders: of runs or evaluations. Several are compared.
        file: to write. Default: `report.html` in the folder of a single run, `comparison.html` here for several.
        texts: show texts of the rows.

    Raises:
        UserError: a folder holds no run.
        OSError: the disk does not take it.
    """
    runs = _named(folders)
    page = report_page(runs[0], texts) if len(runs) == 1 else comparison_page(runs)
    if file is None:
        file = folders[0] / REPORT if len(runs) == 1 else Path("comparison.html")
    pictures = file.parent / (FIGURES if file.name == REPORT else f"{file.stem}_{FIGURES}")
    for each in page.pictures:
        write_whole(pictures / f"{each.name}.png", each.png)
    write_whole(file, page.html)
    return file


def write_without_texts(run: Path, folder: Path) -> bool:
    """Write the report of a run for others, without texts of its rows, which may be of people who never agreed.

    Args:
        run: folder of the run. Nothing is written if it has no report or no texts.
        folder: that is published, which may be the run's own.

    Returns:
        Whether a report was written.
    """
    if not ((run / REPORT).is_file() and any((run / name).is_file() for name in _TEXTS)):
        return False
    write_report([run], folder / REPORT, texts=False)
    return True


def _named(folders: Sequence[Path]) -> list[ReportedRun]:
    """The runs, by the shortest ends of their paths that tell them apart."""
    paths = [folder.absolute() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


@dataclass(frozen=True)
class Page:
    """A page, and its pictures."""

    html: str
    pictures: list[Picture]


def report_page(run: ReportedRun, texts: bool = True) -> Page:
    """The report of a run.

    Args:
        run: to show.
        texts: show texts of the rows.
    """
    breakdown = run.breakdown
    with drawing():
        curves, languages = list(pictures.draw_curves([run])), pictures.draw_languages([run])
        matrix = None if breakdown is None else pictures.draw_confusion(breakdown)
        sure = None if breakdown is None or breakdown.calibration is None else breakdown.calibration
        reliability = None if sure is None else pictures.draw_reliability(sure)
    found, data = list(findings_of(run, texts)), run.facts.metrics.get("data") or {}
    chosen, others = report_tables.setting_tables(run.facts)
    html = _rendered(
        "run.html.jinja",
        title=run.name,
        run=run,
        verdicts=list(verdicts_of(run)),
        curves=curves,
        languages=languages,
        scores=report_tables.score_tables(run),
        matrices=[] if breakdown is None else report_tables.matrices(breakdown),
        all_languages=0 if breakdown is None else len(breakdown.by["language"]),
        reliability=reliability,
        about_mistakes=about_mistakes(run),
        mistakes=mistakes_of(run) if texts else [],
        hidden_mistakes=0 if texts else len(mistakes_of(run)),
        answers=run.answers[:_MOST_ANSWERS] if texts else [],
        data=report_tables.data_table(run.facts),
        notes=[note for note in data.get("notes") or [] if note not in {each.reason for each, _ in found}],
        health=report_tables.health_tables(run),
        findings=found,
        baseline=run.facts.baseline,
        chosen=chosen,
        others=others,
        command=run.facts.command if run.facts.chosen else "",
        environment=report_tables.environment_table(run.facts),
    )
    return Page(html, [each for each in (*curves, languages, matrix, reliability) if each is not None])


def comparison_page(runs: Sequence[ReportedRun]) -> Page:
    """The page that compares runs."""
    with drawing():
        curves, languages = list(pictures.draw_curves(runs)), pictures.draw_languages(runs)
    html = _rendered(
        "runs.html.jinja",
        title=", ".join(run.name for run in runs),
        runs=[(run, list(verdicts_of(run))) for run in runs],
        curves=curves,
        languages=languages,
        scores=report_tables.compared_scores(runs),
        settings=report_tables.compared_settings(runs),
        environment=report_tables.compared_environments(runs),
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
