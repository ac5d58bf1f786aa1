"""The HTML of a report: verdicts in sentences, the most confident mistakes, pictures and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from indictune.console_text import shown_language
from indictune.evaluation.breakdown import MISTAKES, SPLITS
from indictune.files import HEALTH, SAMPLES, write_whole
from indictune.hub.card_facts import with_interval
from indictune.hub.public_text import harmless, templates_in, without_folders
from indictune.report import pictures, reported_run
from indictune.report.pictures import Picture, drawing
from indictune.report.reported_run import DIGITS, ReportedRun, Table, read_run, titled

_MOST_MISTAKES = 30
_ABOUT = {
    "answers": "The answers of each language with the largest loss.",
    "texts": "The texts of each language with the largest loss.",
    "preferences": "The rows of each language with the largest loss.",
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
            yield Verdict(f"Worst language: {shown_language(breakdown.worst_language)}", reason)
    if (against := against_baseline(run)) is not None:
        yield against
    if breakdown is not None and (sure := breakdown.calibration) is not None:
        after = ""
        if sure.calibrated_ece is not None and sure.calibrated_ece < sure.ece:
            after = f" With predict --calibrated it is {sure.calibrated_ece:.3f} (temperature {sure.temperature:.2f})."
        yield Verdict(f"Calibration error {sure.ece:.3f}", f"Mean distance of confidence and accuracy.{after}")


def findings_of(run: ReportedRun, texts: bool) -> Iterator[tuple[Verdict, list[str]]]:
    """What was found in the rows, warnings first, with examples, which are texts of the rows."""
    for each in sorted(run.health.get("findings") or [], key=lambda each: not each.get("warns")):
        where = f" ({shown_language(each['language'])})" if each.get("language") else ""
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
    own = None if run.breakdown is None else run.breakdown.overall.scores.get("macro_f1")
    if own is not None and own.low <= first <= own.high:
        reason += " But the interval of the model's own score contains the baseline's: more rows would tell."
        return Verdict("Hardly better than the baseline", reason, "warning")
    return Verdict("Better than the baseline", reason, "good")


@dataclass(frozen=True)
class Mistake:
    """A row that the model gets wrong."""

    text: str
    lang: str  # its language for a browser; empty for a name that is no code
    where: str  # its file and line, without the folder
    language: str
    right: str  # label, labels, number or tags; empty for a language model
    predicted: str
    how_wrong: str  # how sure the model was, or how far off
    answers: Mapping[str, str]  # of a pair, by what they are


def mistakes_of(run: ReportedRun) -> list[Mistake]:
    """The worst rows of the split that the report is about, of all languages in turn."""
    rows = run.mistakes.get(run.split) or []
    languages = [row["language"] for row in rows]
    ranks = [languages[:at].count(language) for at, language in enumerate(languages)]
    chosen = sorted(sorted(range(len(rows)), key=ranks.__getitem__)[:_MOST_MISTAKES])
    kind = "" if run.breakdown is None else run.breakdown.kind
    return [_mistake(kind, rows[at]) for at in chosen]


def _mistake(kind: str, row: Mapping[str, Any]) -> Mistake:
    language, where = str(row["language"]), str(row.get("row") or "").replace("\\", "/").rpartition("/")[2]
    is_romanised = row.get("script") == "romanised" and "-" not in language
    lang = f"{language}-Latn" if is_romanised else language
    lang = lang if _LANGUAGE.fullmatch(language) else ""
    answers = {name: str(row[name]) for name in ("chosen", "rejected") if name in row}
    return Mistake(str(row["text"]), lang, where, shown_language(language), *_compared(kind, row), answers)


def _compared(kind: str, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What is right, what the model says, and how wrong that is."""
    wrong = float(row["wrongness"])
    if kind == "preferences":
        sides = [name for name in ("chosen", "rejected", "good", "bad") if row.get(f"{name}_tokens")]
        lengths = ", ".join(f"{row[f'{name}_tokens']} tokens {name}" for name in sides)
        return "", "", f"loss {wrong:.2f}, margin {row['reward_margin']:+.2f}; {lengths}"
    if kind in ("answers", "texts"):
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


REPORT = "report.html"
FIGURES = "figures"
_TEXTS = (MISTAKES, HEALTH, SAMPLES)  # whose texts of rows a report shows
_MOST_ANSWERS = 10


def write_report(folders: Sequence[Path], file: Path | None = None, texts: bool = True) -> Path:
    """Write a page and its pictures; returns the page's path. A `UserError` if a folder holds no run.

    Args:
        folders: of runs or evaluations. Several are compared.
        file: to write. Default: `report.html` in the folder of a single run, `comparison.html` here for several.
    """
    runs = _named(folders)
    html, drawn = report_page(runs[0], texts) if len(runs) == 1 else comparison_page(runs)
    if file is None:
        file = folders[0] / REPORT if len(runs) == 1 else Path("comparison.html")
    folder = file.parent / (FIGURES if file.name == REPORT else f"{file.stem}_{FIGURES}")
    for each in drawn:
        write_whole(folder / f"{each.name}.png", each.png)
    write_whole(file, html)
    return file


def write_without_texts(run: Path, folder: Path) -> bool:
    """Write the report of a run for others, without texts of its rows, which may be of people who never agreed.

    Whether a report was written: not for a run without a report or texts. `folder` is not the run's own.
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


def report_page(run: ReportedRun, texts: bool) -> tuple[str, list[Picture]]:
    """The report of a run, and its pictures."""
    breakdown = run.breakdown
    with drawing():
        curves, languages = list(pictures.draw_curves([run])), pictures.draw_languages([run])
        matrix = None if breakdown is None else pictures.draw_confusion(breakdown)
        reliability = pictures.draw_reliability(breakdown.calibration) if breakdown and breakdown.calibration else None
    found, noted = list(findings_of(run, texts)), (run.facts.metrics.get("data") or {}).get("notes") or []
    chosen, others = reported_run.setting_tables(run.facts)
    html = rendered(
        "run.html.jinja",
        title=run.name,
        run=run,
        verdicts=list(verdicts_of(run)),
        curves=curves,
        languages=languages,
        scores=reported_run.score_tables(run),
        matrices=[] if breakdown is None else reported_run.matrices(breakdown),
        reliability=reliability,
        about_mistakes=_SURE if breakdown is None else _ABOUT.get(breakdown.kind, _SURE),
        mistakes=mistakes_of(run),
        texts=texts,
        answers=run.answers[:_MOST_ANSWERS] if texts else [],
        data=Table("Training rows", ["", "rows"], rows) if (rows := run.facts.training_rows) else None,
        notes=[note for note in noted if note not in {each.reason for each, _ in found}],
        health=reported_run.health_tables(run),
        findings=found,
        chosen=chosen,
        others=others,
        environment=reported_run.environment_table(run.facts),
    )
    return html, [each for each in (*curves, languages, matrix, reliability) if each is not None]


def comparison_page(runs: Sequence[ReportedRun]) -> tuple[str, list[Picture]]:
    """The page that compares runs, and its pictures."""
    with drawing():
        curves, languages = list(pictures.draw_curves(runs)), pictures.draw_languages(runs)
    html = rendered(
        "runs.html.jinja",
        title=", ".join(run.name for run in runs),
        runs=[(run, list(verdicts_of(run))) for run in runs],
        curves=curves,
        languages=languages,
        scores=reported_run.compared_scores(runs),
        settings=reported_run.compared_settings(runs),
        environment=reported_run.compared_environments(runs),
    )
    return html, [*curves, *([languages] if languages else [])]


def rendered(template: str, **content: Any) -> str:
    """A page by a template. All that is not our own markup is escaped, and loses tokens and control characters."""

    def finalize(value: object) -> str:
        return value if isinstance(value, Markup) else harmless(value)

    environment = templates_in(Path(__file__).parent, autoescape=True, finalize=finalize)
    return environment.get_template(template).render(**content)
