"""The tables of a report, as rows of texts that the page escapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from indictune.evaluation.breakdown import SPLITS, Breakdown, Group
from indictune.hub.card_facts import (
    GROUPS,
    NOT_OF_THE_TRAINING,
    RATIOS,
    CardFacts,
    block_rows,
    group_cells,
    label_rows,
    public_value,
    with_interval,
)
from indictune.report.reported_run import ReportedRun

DIGITS = 3  # of a score
_LONGEST_VALUE = 200
_MOST_CELLS = 10_000  # of all matrices
_MOST_LANGUAGES = 24


@dataclass(frozen=True)
class Table:
    """A table: the first cell of a row is its header."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: `rows` of a right label and, for each predicted one, the count and its share of the row."""

    caption: str
    labels: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[int, float]]]]


def spaced(name: str) -> str:
    """A name of a score in words."""
    return name.replace("_", " ").replace("f1", "F1")


def titled(name: str) -> str:
    """The same at the start of a text."""
    return spaced(name)[:1].upper() + spaced(name)[1:]


def score_tables(run: ReportedRun) -> list[Table]:
    """Scores of all rows and of each group, and of each label."""
    if run.breakdown is None:
        block = run.facts.metrics.get(run.split)
        if not block:
            return []
        names, rows = block_rows(block, DIGITS)
        return [Table(f"Scores of the {SPLITS[run.split]} rows", ["", "rows", *map(spaced, names)], rows)]
    found = _group_tables(run.breakdown, "Scores")
    for split, each in run.facts.breakdowns.items():
        if each.written is not None:
            found += _group_tables(each.written, f"Answers that the model wrote, {SPLITS[split]} rows")
    if rows := label_rows(run.breakdown.overall, DIGITS):
        found.append(Table("Scores by label", ["", "rows", *RATIOS], rows))
    return found


def _group_tables(breakdown: Breakdown, title: str) -> list[Table]:
    """The scores by language, script and length."""
    names, found = list(breakdown.overall.scores), list[Table]()
    header = ["", "rows", *map(spaced, names)]
    for what in GROUPS:
        groups = breakdown.by.get(what) or {}
        if len(groups) > 1 or what == "language":
            caption = f"{title} by {what}{', in tokens' if what == 'length' else ''}"
            named = [("all", breakdown.overall), *groups.items()]
            found.append(Table(caption, header, [[name, *group_cells(each, names, DIGITS)] for name, each in named]))
    return found


def largest_languages(breakdown: Breakdown, most: int) -> dict[str, Group]:
    """The languages with the most rows: fewer than `most` if matrices of that many labels would fill the page."""
    groups, labels = breakdown.by["language"], len(breakdown.labels)
    chosen = sorted(groups, key=lambda name: -groups[name].num_examples)
    chosen = chosen[: min(most, max(1, _MOST_CELLS // max(1, labels**2)))]
    return {name: group for name, group in groups.items() if name in chosen}


def matrices(breakdown: Breakdown) -> list[Matrix]:
    """The confusion matrix of all rows and of each language, or of the largest ones."""
    groups = largest_languages(breakdown, _MOST_LANGUAGES)
    some = {"all languages": breakdown.overall, **groups} if len(breakdown.by["language"]) > 1 else groups
    found = []
    for name, group in some.items():
        if group.confusion:
            rows = [
                (label, [(count, count / max(1, sum(counts))) for count in counts])
                for label, counts in zip(breakdown.labels, group.confusion, strict=True)
            ]
            found.append(Matrix(name, breakdown.labels, rows))
    return found


def setting_tables(facts: CardFacts) -> tuple[Table, Table]:
    """What the user chose, and all other settings."""
    public = public_settings(facts)
    chosen = [[name, value] for name, value in public.items() if name in facts.chosen]
    others = [[name, value] for name, value in sorted(public.items()) if name not in facts.chosen]
    header = ["setting", "value"]
    return Table("Chosen", header, chosen), Table("Defaults, and what followed from the run", header, others)


def public_settings(facts: CardFacts) -> dict[str, str]:
    """The configuration without what is of this machine or of a push, as texts."""
    return {
        name: _value(name, value)
        for name, value in (facts.chosen | facts.settings).items()
        if name not in NOT_OF_THE_TRAINING and not name.startswith("hub_") and value not in (None, [], {})
    }


def _value(name: str, value: Any) -> str:
    texts = [public_value(name, each) for each in value] if isinstance(value, list) else [public_value(name, value)]
    text = ", ".join(texts)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def environment_table(facts: CardFacts) -> Table:
    """Where and on what the run trained, and what it took."""
    metrics = facts.metrics
    train: Mapping[str, Any] = metrics.get("train") or {}
    energy = facts.energy.get("energy_consumed")
    body = {
        **facts.how_it_ran,
        "training time": _of(train, "runtime_s", "{:,.0f} s"),
        "time to the first step": _of(train, "time_to_first_step_s", "{:,.1f} s"),
        "throughput": _of(train, "samples_per_second", "{:,.0f} rows/s"),
        "tokens": _of(train, "tokens_per_second", "{:,.0f} tokens/s"),
        "padding": _of(train, "padding_fraction", "{:.1%}"),
        "peak memory": _of({"gb": train.get("peak_memory_bytes", 0) / 1e9 or None}, "gb", "{:,.2f} GB"),
        "energy": f"{energy} kWh (codecarbon)" if energy else None,
        **(metrics.get("versions") or {}),
    }
    rows = [[name, str(value)] for name, value in body.items() if value not in (None, "")]
    return Table("Environment", ["", ""], rows)


def _of(block: Mapping[str, Any], name: str, form: str) -> str | None:
    value = block.get(name)
    return form.format(value) if isinstance(value, int | float) else None


def data_table(facts: CardFacts) -> Table | None:
    """Training rows by language and label."""
    found: Mapping[str, Any] = facts.metrics.get("data") or {}
    if "rows" not in found:
        return None
    counted = [("language", found.get("languages") or {}), ("label", found.get("labels") or {})]
    body = [[f"{what} {name}", f"{count:,}"] for what, each in counted for name, count in each.items()]
    return Table("Training rows", ["", "rows"], [["all", f"{found['rows']:,}"], *body])


def health_tables(run: ReportedRun) -> list[Table]:
    """The tables of `health.json`: what the tokenizer does to each language, and how often each has a label."""
    found = []
    for name, caption in (("languages", "What the tokenizer does"), ("labels", "Labels of the training rows")):
        rows = [row for row in run.health.get(name) or [] if isinstance(row, dict)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        if rows:
            body = [[_measured(name, row.get(name)) for name in names] for row in rows]
            found.append(Table(caption, list(map(spaced, names)), body))
    return found


def _measured(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2%}" if "share" in name else f"{value:,.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def compared_scores(runs: Sequence[ReportedRun]) -> list[Table]:
    """The main scores of the runs, of all rows and by language."""
    known = [(run, run.breakdown) for run in runs if run.breakdown is not None]
    found = []
    for name in dict.fromkeys(name for _, each in known for name in each.overall.scores):
        here = [(run, each) for run, each in known if name in each.overall.scores]
        languages = dict.fromkeys(language for _, each in here for language in each.by["language"])
        body = [["all", *(with_interval(each.overall.scores[name], DIGITS) for _, each in here)]]
        for language in sorted(languages):
            groups = [each.by["language"].get(language) for _, each in here]
            body.append([language, *(with_interval(group.scores[name], DIGITS) if group else "" for group in groups)])
        found.append(Table(titled(name), ["", *(run.name for run, _ in here)], body))
    return found


def compared_settings(runs: Sequence[ReportedRun]) -> Table | None:
    """The settings in which the runs differ; None if fewer than two have settings. An evaluation has none."""
    each = {run.name: found for run in runs if (found := public_settings(run.facts))}
    if len(each) < 2:
        return None
    names = sorted({name for settings in each.values() for name in settings})
    body = [[name, *(settings.get(name, "") for settings in each.values())] for name in names]
    differing = [row for row in body if len(set(row[1:])) > 1]
    return Table("Settings that differ", ["setting", *each], differing)


def compared_environments(runs: Sequence[ReportedRun]) -> Table:
    """Where the runs trained, side by side."""
    each = [{row[0]: row[1] for row in environment_table(run.facts).rows} for run in runs]
    names = dict.fromkeys(name for rows in each for name in rows)
    body = [[name, *(rows.get(name, "") for rows in each)] for name in names]
    return Table("Environment", ["", *(run.name for run in runs)], body)
