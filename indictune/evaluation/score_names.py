"""The scores of a breakdown by name: in `metrics.json`, for `--metric_for_best_model`, and on the console."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from indictune.console_text import table
from indictune.evaluation.breakdown import Breakdown, Group, LabelScores

RATIOS = ("precision", "recall", "f1")  # of each label
WORST = "worst_language_"
WRITTEN = ("chrf", "exact_match")  # of answers that a language model writes
_MARKUP = re.compile(r"[\x00-\x1f\x7f<>&|`\[\]()\\:\"'!*#]")


def block_of(found: Breakdown, scores_of: Callable[[Group], Mapping[str, float]]) -> dict[str, Any]:
    """The block of `metrics.json` that all tasks have: `num_examples`, `loss`, the scores, and `per_language`."""
    per_language = {
        language: {"num_examples": group.num_examples, **scores_of(group)}
        for language, group in found.by["language"].items()
    }
    overall = {"num_examples": found.overall.num_examples, "loss": found.loss, **scores_of(found.overall)}
    return overall | {"per_language": per_language}


def label_block(per_label: Mapping[str, LabelScores]) -> dict[str, dict[str, float]]:
    """`<label>.{precision,recall,f1,support}`, as `metrics.json` has them."""
    return {
        label: {name: getattr(scores, name).value for name in RATIOS} | {"support": scores.support}
        for label, scores in per_label.items()
    }


def without_markup(name: str) -> str:
    """A language or label in a metric's name. The Trainer's model card would take some characters for markup."""
    return _MARKUP.sub("_", name)


def score_names(
    scores: Sequence[str], labels: Iterable[str], groups: Mapping[str, Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Where the score of each name stands: a path for `_score_at`.

    `scores` are those of a group of rows, the main one first; `groups` is `language`, `script` and `length` -> values.
    """
    found: dict[str, tuple[str, ...]] = {name: ("overall", name) for name in scores}
    found[f"{WORST}{scores[0]}"] = ("worst",)
    of_labels = {f"{ratio}_{without_markup(label)}": (label, ratio) for label in labels for ratio in RATIOS}
    found |= {name: ("label", *path) for name, path in of_labels.items()}
    of_both: dict[str, tuple[str, ...]] = {}
    for what, values in groups.items():
        for value in values:
            shown = f"length_{value.replace(' ', '_')}" if what == "length" else without_markup(value)
            found |= {f"{name}_{shown}": ("by", what, value, name) for name in scores}
            of_both |= {f"{name}_{shown}": ("label", *path, what, value) for name, path in of_labels.items()}
    return found | {name: path for name, path in of_both.items() if name not in found}


def named_scores(found: Breakdown) -> dict[str, float]:
    """Every score of a breakdown by its name."""
    overall = found.overall
    paths = score_names(list(overall.scores), overall.per_label, found.by)
    of_written = {} if found.written is None else named_scores(found.written)
    return {name: _score_at(found, path) for name, path in paths.items()} | of_written


def _score_at(found: Breakdown, path: tuple[str, ...]) -> float:
    match path:
        case ("overall", name):
            return found.overall.scores[name].value
        case ("label", label, ratio, *where):
            group = found.by[where[0]][where[1]] if where else found.overall
            value: float = getattr(group.per_label[label], ratio).value
            return value
        case ("by", what, of, name):
            return found.by[what][of].scores[name].value
    return found.by["language"][found.worst_language].scores[found.score].value


def near_names(name: str, known: Iterable[str]) -> str:
    """The known names that are most like a name, the most like first."""
    names = list(known)
    return ", ".join(difflib.get_close_matches(name, names, n=5, cutoff=0.4) or names[:5])


def metrics_tables(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    """Lay out some scores of a block of `metrics.json`, a line for each language and a last one for all rows.

    Where labels have scores, a second table has precision, recall, F1 and support of each label of the model.
    """
    columns = ("num_examples", *names)
    languages = [[name, *_cells(row, columns)] for name, row in metrics["per_language"].items()]
    tables = [table(["language", "examples", *names], languages, footer=["all", *_cells(metrics, columns)])]
    if "per_label" in metrics:
        ratios = (*RATIOS, "support")
        labels = [[label, *_cells(row, ratios)] for label, row in metrics["per_label"].items()]
        tables.append(table(["label", *ratios], labels))
    return "\n\n".join(tables)


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    values = (row[name] for name in names)
    return [f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in values]


def in_sentences(breakdown: Breakdown) -> str:
    """The main score with its interval, of all rows and of the worst language, and the calibration."""

    def shown(group: Group) -> str:
        score = group.scores[breakdown.score]
        return f"{score.value:.4f}, 95% interval {score.low:.4f} to {score.high:.4f}"

    lines = [f"{breakdown.score}: {shown(breakdown.overall)}"]
    if len(breakdown.by["language"]) > 1:
        worst = breakdown.worst_language
        lines.append(f"worst language, {worst}: {shown(breakdown.by['language'][worst])}")
    for what in ("script", "length"):
        groups = breakdown.by.get(what, {})
        if len(groups) > 1:
            values = (f"{name} {group.scores[breakdown.score].value:.4f}" for name, group in groups.items())
            lines.append(f"by {what}: {', '.join(values)}")
    if (sure := breakdown.calibration) is not None:
        lines.append(f"calibration error: {sure.ece:.4f}")
        if sure.temperature is not None:
            lines[-1] += f"; {sure.calibrated_ece:.4f} at temperature {sure.temperature:.2f}"
    if (written := breakdown.written) is not None:
        same = written.overall.scores["exact_match"].value
        lines.append(f"answers written by the model: {written.overall.num_examples:,}, exact match {same:.4f}")
        lines.append(in_sentences(written))
    return "\n".join(lines)
