"""What a report shows of a run, read from the files in its folder: facts, and tables as rows of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from indictune.console_text import shown_language
from indictune.errors import UserError
from indictune.evaluation.breakdown import EVALUATION, MISTAKES, RATIOS, SPLITS, Breakdown, Group
from indictune.files import HEALTH, SAMPLES, json_or_nothing
from indictune.hub import card_facts
from indictune.hub.card_facts import GROUPS, NOT_OF_THE_TRAINING, CardFacts

_TRAIN_LOG = "train_log.jsonl"
_MOST_POINTS = 400  # of a curve


@dataclass(frozen=True)
class Curve:
    """A value in the course of the training: `steps` and `values`, each [points]."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class ReportedRun:
    """A run, as its report sees it."""

    name: str  # of the folder, or one that tells it from other runs
    facts: CardFacts
    log: Sequence[dict[str, Any]]  # of the training, a dict a logged step
    evaluations: Sequence[dict[str, Any]]  # during the training, likewise
    mistakes: dict[str, list[dict[str, Any]]]
    health: dict[str, Any]
    answers: Sequence[dict[str, Any]]  # that a language model wrote, each with its prompt and the right one

    @property
    def split(self) -> str:
        """The block that the report is about: `test` if there is one."""
        blocks = self.facts.breakdowns or self.facts.metrics
        return next((split for split in SPLITS if blocks.get(split)), "")

    @property
    def breakdown(self) -> Breakdown | None:
        """Scores for whom."""
        return self.facts.breakdowns.get(self.split)

    def curve(self, name: str, of: Sequence[dict[str, Any]] | None = None) -> Curve | None:
        """The curve of a value, at most 400 means of equally many logged steps; None without it."""
        rows = [(row["step"], _number(row[name])) for row in (self.log if of is None else of) if name in row]
        if not rows:
            return None
        parts = np.array_split(np.array(rows, np.float64), min(len(rows), _MOST_POINTS))
        steps, values = np.array([part.mean(0) for part in parts]).T
        return Curve(steps, values)


def read_run(folder: Path, name: str | None = None) -> ReportedRun:
    """Read a run's folder, or that of an evaluation; a `UserError` if it holds none."""
    try:
        facts = card_facts.card_facts_of(folder, None, folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError("unreadable", "indictune report", f"{folder}: its {EVALUATION}", reason=reason) from error
    log = [row for row in _json_lines(folder / _TRAIN_LOG) if isinstance(row.get("step"), int)]
    if not (facts.metrics or facts.breakdowns or log):
        raise UserError("report-needs-run", "indictune report", folder)
    evaluations = [row for row in _history(folder) if "eval_loss" in row and "step" in row]
    mistakes, health = json_or_nothing(folder / MISTAKES), json_or_nothing(folder / HEALTH)
    answers = [row for row in _json_lines(folder / SAMPLES) if {"prompt", "reference", "answer"} <= row.keys()]
    return ReportedRun(name or folder.absolute().name, facts, log, evaluations, mistakes, health, answers)


def _history(folder: Path) -> list[dict[str, Any]]:
    """What the Trainer logged until the last checkpoint."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    numbered = {int(path.parent.name.rpartition("-")[2]): path for path in states if path.parent.name[11:].isdecimal()}
    rows = json_or_nothing(numbered[max(numbered)]).get("log_history") if numbered else []
    return [row for row in rows or [] if isinstance(row, dict)]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    lines = list[str]()
    with suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for line in lines:
        with suppress(ValueError):  # a killed run may have left an unfinished line
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _number(value: Any) -> float:
    with suppress(TypeError, ValueError):
        return float(value)  # NaN is a text in JSON
    return float("nan")


DIGITS = 3  # of a score
_MEASURED = (
    ("training time", "runtime_s", "{:,.0f} s"),
    ("time to the first step", "time_to_first_step_s", "{:,.1f} s"),
    ("throughput", "samples_per_second", "{:,.1f} rows/s"),
    ("tokens", "tokens_per_second", "{:,.0f} tokens/s"),
    ("padding", "padding_fraction", "{:.1%}"),
    ("peak memory", "peak_memory_gb", "{:,.2f} GB"),
)
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
        names, rows = card_facts.block_rows(block, DIGITS)
        return [Table(f"Scores of the {SPLITS[run.split]} rows", ["", "rows", *map(spaced, names)], rows)]
    found = _group_tables(run.breakdown, "Scores")
    for split, each in run.facts.breakdowns.items():
        if each.written is not None:
            found += _group_tables(each.written, f"Answers that the model wrote, {SPLITS[split]} rows")
    if rows := card_facts.label_rows(run.breakdown.overall, DIGITS):
        found.append(Table("Scores by label", ["", "rows", *RATIOS], rows))
    return found + _answer_lengths(run.breakdown, run.facts.metrics.get("answer_lengths") or {})


_ANSWERS = {"chosen": "chosen", "rejected": "rejected", "reference": "right, of those written"}
_ANSWERS |= {"before": "written before training", "after": "written after training"}


def _answer_lengths(breakdown: Breakdown, of_run: Mapping[str, float]) -> list[Table]:
    """The mean tokens of both answers of pairs, which a model may learn in place of what is better.

    `of_run` has those of all rows, also of answers that the model wrote.
    """
    groups = {shown_language(name): _mean_lengths(each) for name, each in breakdown.by["language"].items()}
    means = {"all": {**_mean_lengths(breakdown.overall), **of_run}} | {of: each for of, each in groups.items() if each}
    names = [name for name in _ANSWERS if name in means["all"]]
    rows = [[of, *(f"{each[name]:.1f}" if name in each else "" for name in names)] for of, each in means.items()]
    return [Table("Tokens of an answer, on average", ["", *map(_ANSWERS.__getitem__, names)], rows)] if names else []


def _mean_lengths(group: Group) -> dict[str, float]:
    counted = {name: group.counts.get(f"{name}_tokens") for name in ("chosen", "rejected")}
    return {name: tokens / group.num_examples for name, tokens in counted.items() if tokens is not None}


def _group_tables(breakdown: Breakdown, title: str) -> list[Table]:
    names, found = list(breakdown.overall.scores), list[Table]()
    header = ["", "rows", *map(spaced, names)]
    for what in GROUPS:
        groups = breakdown.by.get(what) or {}
        if len(groups) > 1 or what == "language":
            caption = f"{title} by {what}{', in tokens' if what == 'length' else ''}"
            named = {"all": breakdown.overall, **{shown_language(name): each for name, each in groups.items()}}
            rows = [[name, *card_facts.group_cells(each, names, DIGITS)] for name, each in named.items()]
            found.append(Table(caption, header, rows))
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
            found.append(Matrix(shown_language(name), breakdown.labels, rows))
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
    values = value if isinstance(value, list) else [value]
    text = ", ".join(card_facts.public_value(name, each) for each in values)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def environment_table(facts: CardFacts) -> Table:
    """Where and on what the run trained, and what it took."""
    train: Mapping[str, Any] = facts.metrics.get("train") or {}
    train = {**train, "peak_memory_gb": train.get("peak_memory_bytes", 0) / 1e9 or None}
    energy = facts.energy.get("energy_consumed")
    body = {
        **facts.how_it_ran,
        **{name: form.format(train[key]) for name, key, form in _MEASURED if isinstance(train.get(key), int | float)},
        "energy": f"{energy} kWh (codecarbon)" if energy else None,
        **(facts.metrics.get("versions") or {}),
    }
    rows = [[name, str(value)] for name, value in body.items() if value not in (None, "")]
    return Table("Environment", ["", ""], rows)


def health_tables(run: ReportedRun) -> list[Table]:
    """The tables of `health.json`: what the tokenizer does to each language, and how often each has a label."""
    found = []
    for name, caption in (("languages", "What the tokenizer does"), ("labels", "Labels of the training rows")):
        given = (row for row in run.health.get(name) or [] if isinstance(row, dict))
        rows = [row | {"language": shown_language(str(row.get("language", "")))} for row in given]
        names = list(dict.fromkeys(name for row in rows for name in row))
        if rows:
            body = [[_health_cell(name, row.get(name)) for name in names] for row in rows]
            found.append(Table(caption, list(map(spaced, names)), body))
    return found


def _health_cell(name: str, value: Any) -> str:
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
        body = [["all", *(card_facts.with_interval(each.overall.scores[name], DIGITS) for _, each in here)]]
        for language in sorted(languages):
            groups = [each.by["language"].get(language) for _, each in here]
            scores = (group.scores.get(name) if group else None for group in groups)
            cells = ("" if score is None else card_facts.with_interval(score, DIGITS) for score in scores)
            body.append([shown_language(language), *cells])
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
