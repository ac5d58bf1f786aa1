"""Scores for whom: of all rows, by language, script and length; their names; and the rows that are most wrong."""

from __future__ import annotations

import difflib
import heapq
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from indictune.console_text import shown_language, table
from indictune.evaluation.uncertainty import RESAMPLES, Bin, Calibration, Estimate

EVALUATION = "evaluation.json"
SPLITS = {"test": "test", "eval": "validation"}  # blocks of it and of metrics.json, and what a reader calls them
MAX_CONFUSED = 50  # labels of a confusion matrix
_LENGTHS = (16, 32, 64, 128, 256, 512)  # last tokens of the buckets


@dataclass(frozen=True)
class LabelScores:
    """Scores of a label or of a kind of entity; `support` is how often it is right, `predicted` how often given."""

    precision: Estimate
    recall: Estimate
    f1: Estimate
    support: int
    predicted: int = 0


@dataclass(frozen=True)
class Group:
    """Scores of some rows.

    Attributes:
        scores: by name, the main one first.
        per_label: by label; empty for a task without labels.
        confusion: rows of each label (first index) and predicted label, of one label a row and at most 50 labels.
        counts: `num_tokens` of answers, `num_tags` of tagged words, `chosen_tokens` and `rejected_tokens` of pairs.
    """

    num_examples: int
    scores: dict[str, Estimate]
    per_label: dict[str, LabelScores] = field(default_factory=dict)
    confusion: list[list[int]] | None = None
    counts: dict[str, int] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores rows by their numbers, int64 [some rows], with intervals from `draws` of them; first the main score."""

    def __call__(self, rows: np.ndarray, draws: int = RESAMPLES) -> Group: ...


@dataclass(frozen=True)
class Breakdown:
    """Scores of an evaluation.

    Attributes:
        kind: of the task: `single_label`, `multi_label`, `regression`, `entities`, `answers`, `written_answers`,
            `texts` or `preferences`.
        score: name of the main score, and `lower_is_better` whether it is best where it is lowest.
        labels: in the order of the class ids.
        by: `language`, `script` and `length` (tokens as read) -> value -> scores of its rows.
        worst_language: by the main score, however few rows it has, of those whose rows have or were given labels.
        calibration: of one label a row.
        written: of answers that a language model wrote, to some of the rows.
    """

    kind: str
    score: str
    lower_is_better: bool
    labels: list[str]
    overall: Group
    by: dict[str, dict[str, Group]]
    worst_language: str
    loss: float = math.nan
    calibration: Calibration | None = None
    written: Breakdown | None = None


@dataclass(frozen=True)
class RowFacts:
    """The groups of each row, each [rows]: `languages`, `scripts` (None if unknown) and `lengths` in tokens."""

    languages: Sequence[str]
    scripts: Sequence[str] | None
    lengths: np.ndarray

    def groups(self) -> dict[str, dict[str, np.ndarray]]:
        """`language`, `script` and `length` -> value -> the numbers of its rows."""
        found = {"language": rows_by_value(self.languages)}
        if self.scripts is not None:
            found["script"] = rows_by_value(self.scripts)
        buckets = np.searchsorted(_LENGTHS, self.lengths)
        names = [f"{first + 1}-{last}" for first, last in zip((0, *_LENGTHS), _LENGTHS, strict=False)]
        names.append(f"over {_LENGTHS[-1]}")
        of_bucket = {name: np.flatnonzero(buckets == number) for number, name in enumerate(names)}
        return found | {"length": {name: rows for name, rows in of_bucket.items() if len(rows)}}


def rows_by_value(values: Sequence[str]) -> dict[str, np.ndarray]:
    """The numbers of the rows that have each value, sorted by value."""
    coded = pa.array(values, pa.string()).dictionary_encode()
    codes, names = coded.indices.to_numpy(), coded.dictionary.to_pylist()
    return {names[number]: np.flatnonzero(codes == number) for number in np.argsort(names)}


def break_down(
    kind: str,
    facts: RowFacts,
    scorer: Scorer,
    labels: Sequence[str] = (),
    calibration: Calibration | None = None,
    lower_is_better: bool = False,
    loss: float = math.nan,
    draws: int = RESAMPLES,
) -> Breakdown:
    """Score all rows, one at least, and each group of them; the rest as of `Breakdown`. A score may be the loss.

    `draws` are of the rows, for the intervals; 0 for scores without intervals, which take far less time.
    """
    overall = scorer(np.arange(len(facts.languages)), draws)
    groups = facts.groups().items()
    by = {what: {value: scorer(rows, draws) for value, rows in values.items()} for what, values in groups}
    score, sign = next(iter(overall.scores)), -1 if lower_is_better else 1
    languages = by["language"]
    labels_of = {language: group.per_label.values() for language, group in languages.items()}
    scored = [each for each in languages if any(label.support + label.predicted for label in labels_of[each])]
    worst = min(scored or languages, key=lambda language: sign * languages[language].scores[score].value)
    loss = overall.scores["loss"].value if "loss" in overall.scores else loss
    return Breakdown(kind, score, lower_is_better, list(labels), overall, by, worst, loss, calibration)


def mean_loss(losses: np.ndarray, count: int | None = None) -> float:
    """The sum of losses [rows] by a count, or their number; NaN if one is. It is rounded once: no order changes it."""
    return math.fsum(np.asarray(losses, np.float64).tolist()) / (len(losses) if count is None else count)


def as_json(breakdowns: Mapping[str, Breakdown]) -> dict[str, Any]:
    """Breakdowns by split, as `evaluation.json` holds them."""
    return {split: asdict(each) for split, each in breakdowns.items()}


def read_breakdowns(folder: Path) -> dict[str, Breakdown]:
    """The breakdowns of a run or an evaluation by split, `eval` (validation) and `test`; `OSError` without any."""
    content = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
    return {split: _breakdown(each) for split, each in content.items()}


def _breakdown(content: dict[str, Any]) -> Breakdown:
    by = {what: {value: _group(each) for value, each in values.items()} for what, values in content["by"].items()}
    if (calibration := content["calibration"]) is not None:
        bins = [Bin(**each) for each in calibration["bins"]]
        calibration = Calibration(**{**calibration, "bins": bins})
    written = _breakdown(content["written"]) if content.get("written") else None
    made = {"overall": _group(content["overall"]), "by": by, "calibration": calibration, "written": written}
    loss = float(content.get("loss", math.nan))  # files of older versions have none
    return Breakdown(**{**content, **made, "loss": loss})


def _group(content: dict[str, Any]) -> Group:
    scores = {name: _estimate(each) for name, each in content["scores"].items()}
    per_label = {}
    for label, each in content["per_label"].items():
        precision, recall, f1 = (_estimate(each[name]) for name in RATIOS)
        per_label[label] = LabelScores(precision, recall, f1, each["support"], each.get("predicted", 0))
    return Group(content["num_examples"], scores, per_label, content["confusion"], content.get("counts", {}))


def _estimate(content: dict[str, Any]) -> Estimate:
    return Estimate(*(float(content[name]) for name in ("value", "low", "high")))  # NaN is a text in JSON


MISTAKES = "mistakes.json"
_OF_A_LANGUAGE = 5
_OF_A_SPLIT = 100
_CHARACTERS = 600  # of a text
_OF_ANSWERS = ("text", "chosen", "rejected")  # names of a prompt and two answers


class Mistakes:
    """Collects the worst rows of each split and language. Memory does not grow with the rows."""

    def __init__(self) -> None:
        self._worst: dict[tuple[str, str], list[tuple[float, int, dict[str, Any]]]] = {}

    def add(self, row: Mapping[str, Any], *texts: str) -> None:
        """Look at a row of `predictions.jsonl` and at its text, both of a pair, or a prompt and two answers."""
        wrong = wrongness(row)
        if not 0 < wrong < math.inf:
            return
        worst = self._worst.setdefault((row["split"], row["language"]), [])
        if len(worst) == _OF_A_LANGUAGE and wrong <= worst[0][0]:
            return
        kept = {name: value for name, value in row.items() if name not in ("id", "scores")}
        cut = [text[: _CHARACTERS // len(texts)] for text in texts]
        shown = dict(zip(_OF_ANSWERS, cut, strict=True)) if len(cut) == len(_OF_ANSWERS) else {"text": "\n".join(cut)}
        entry = wrong, -row["number"], kept | {"wrongness": wrong} | shown
        (heapq.heappushpop if len(worst) == _OF_A_LANGUAGE else heapq.heappush)(worst, entry)

    def by_split(self) -> dict[str, list[dict[str, Any]]]:
        """The worst rows of each split, the worst first."""
        found: dict[str, list[tuple[float, int, dict[str, Any]]]] = {}
        for (split, _), worst in self._worst.items():
            found.setdefault(split, []).extend(worst)
        return {split: [each[2] for each in heapq.nlargest(_OF_A_SPLIT, rows)] for split, rows in found.items()}


def wrongness(row: Mapping[str, Any]) -> float:
    """How wrong a row of `predictions.jsonl` is; 0 if it is right.

    It is the probability of the wrong label, of one label or several; the distance of numbers; the number of wrong
    tags; or the loss of a language model.
    """
    if "loss" in row:
        return float(row["loss"])
    label, predicted = row["label"], row["predicted"]
    if label == predicted:
        return 0.0
    if isinstance(label, str):
        return float(row["scores"][predicted])
    if not isinstance(label, list):
        return abs(float(label) - float(predicted))
    if "scores" not in row:
        return float(sum(a != b for a, b in zip(label, predicted, strict=True)))
    scores = {name: row["scores"][name] for name in {*label} ^ {*predicted}}
    return float(max(score if name in predicted else 1 - score for name, score in scores.items()))


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
            scores = found.by[what][of].scores
            return scores[name].value if name in scores else math.nan  # a script has none by --metrics
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
    languages = [[shown_language(name), *_cells(row, columns)] for name, row in metrics["per_language"].items()]
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
        lines.append(f"worst language, {shown_language(worst)}: {shown(breakdown.by['language'][worst])}")
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
