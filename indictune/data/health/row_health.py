"""The health of a run's rows: what the tokenizer does to each language, and what rows repeat, contradict or give away.

`health.json` has these keys:

- `rows`: split -> number of rows.
- `languages`: a list of `LanguageHealth`, of the training rows.
- `labels`: a list of `language`, `label`, `count` and `share` (of the language's training rows).
- `findings`: a list of `name`, `language` (null: all), `share`, `count`, `of`, `examples` (texts), `note` (a sentence)
  and `warns` (whether the run warned of it). The names: `unknown_tokens`, `token_collisions`, `duplicate_rows`,
  `leaked_rows`, `near_duplicates`, `conflicting_labels`, `mojibake`, `label_sources` and `labels_of_no_class`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.console_text import table
from indictune.data.cache import StoredRows, build_once
from indictune.data.columns import shortened
from indictune.data.health.findings import (
    MAX_EXAMPLES,
    Finding,
    label_balance,
    label_sources,
    labels_of_no_class,
    near_duplicates,
)
from indictune.data.health.tokenizer_health import LanguageHealth, language_health, language_table, sample_of_languages
from indictune.data.labels import REGRESSION, names
from indictune.errors import Problems, problem
from indictune.files import HEALTH

_MAX_TRAIN, _MAX_HELD_OUT = 50_000, 5_000  # rows whose texts are compared; two seconds
_MANY_NEAR = 0.01
_LIMITS = {
    "token_collisions": ("max_collision_share", "token-collisions"),
    "near_duplicates": ("max_near_duplicate_share", "near-duplicates"),
    "conflicting_labels": ("max_conflict_share", "conflicting-labels"),
}
_MAX_COLUMNS = 8  # labels of the table


@dataclass(frozen=True)
class Split:
    """The rows of a split, and their texts."""

    rows: StoredRows
    texts: Iterable[str]

    def some(self, chosen: np.ndarray) -> dict[int, str]:
        """The texts of the chosen rows, bool [rows], by number."""
        return dict(zip(np.flatnonzero(chosen).tolist(), compress(self.texts, chosen), strict=True))


@dataclass(frozen=True)
class RowHealth:
    """The content of `health.json`: see above."""

    rows: dict[str, int]
    languages: list[LanguageHealth]
    labels: list[dict[str, Any]]
    findings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return asdict(self) | {"findings": [each.as_json() for each in self.findings]}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RowHealth:
        """What `as_json` gave."""
        findings = [
            Finding(**{name: value for name, value in each.items() if name != "share"}) for each in content["findings"]
        ]
        languages = [LanguageHealth(**each) for each in content["languages"]]
        return RowHealth(content["rows"], languages, content["labels"], findings)

    def __str__(self) -> str:
        """Tables of languages and labels, and a line for each finding."""
        parts = [language_table(self.languages)]
        shown = list(dict.fromkeys(each["label"] for each in self.labels))
        if 0 < len(shown) <= _MAX_COLUMNS:
            share = {(each["language"], each["label"]): f"{each['share']:.1%}" for each in self.labels}
            languages = [each.language for each in self.languages]
            body = [[language, *(share.get((language, label), "0.0%") for label in shown)] for language in languages]
            parts.append(table(["labels", *map(shortened, shown)], body))
        return "\n\n".join(
            [*parts, *(["\n".join(f"- {each.in_full}" for each in self.findings)] if self.findings else [])]
        )


def check_health(health: RowHealth | None, configuration: Mapping[str, Any]) -> None:
    """Refuse rows that pass a limit, such as `--max_collision_share`, in the configuration of a run.

    Raises:
        UserError: one problem for each finding.
    """
    problems = Problems()
    for each in () if health is None else health.findings:
        flag, code = _LIMITS.get(each.name, ("", ""))
        limit = configuration.get(flag)
        if limit is not None and each.share > limit:
            problems.append(problem(code, f"--{flag}", limit, note=each.in_full))
    problems.raise_any()


def measured_once(parts: Sequence[object], make: Callable[[], RowHealth]) -> RowHealth:
    """What `make` gives on the first call with these parts, which say what it depends on; `build_once` keeps it."""

    def write(folder: Path) -> None:
        (folder / HEALTH).write_text(json.dumps(make().as_json()), encoding="utf-8")

    folder = build_once("health", parts, "The health of the rows", write)
    return RowHealth.from_json(json.loads((folder / HEALTH).read_text(encoding="utf-8")))


def measure(
    splits: Mapping[str, Split],
    tokenizer: PreTrainedTokenizerBase,
    cut: int | Mapping[str, float],
    found: Sequence[Finding],
    problem_type: str | None = None,
    has_labels: bool = True,
) -> RowHealth:
    """Measure the rows of a run. Of more than 50,000 training rows, a random sample is compared with the others.

    Args:
        cut: tokens that a row may have, or the share of each language's rows that is cut.
        has_labels: whether rows have a column `label`.
    """
    train = splits["train"]
    languages = train.rows.table["language"]
    compared = _sample(len(languages), _MAX_TRAIN)
    of_language = sample_of_languages(languages)
    wanted = compared.copy()
    wanted[np.concatenate(list(of_language.values()))] = True
    texts = train.some(wanted)
    findings, measured = list(found), []
    rows_of = {each["values"]: each["counts"] for each in languages.value_counts().to_pylist()}
    for language, rows in sorted(of_language.items()):
        of_rows = cut if isinstance(cut, int) else cut.get(language, 0.0)
        some = [texts[row] for row in rows.tolist()]
        health, more = language_health(language, rows_of[language], some, tokenizer, of_rows)
        measured.append(health)
        findings += more
    has_classes = has_labels and problem_type != REGRESSION
    sample = {row: text for row, text in texts.items() if compared[row]}
    for name, split in splits.items():
        findings += [] if name == "train" else _near_duplicates(name, split, train, sample, has_classes)
    balance: list[dict[str, Any]] = []
    if has_classes:
        balance = label_balance(train.rows.table, problem_type)
        findings += [*labels_of_no_class(balance, len(languages)), *_sources(train.rows, sample, problem_type)]
    return RowHealth({name: len(split.rows) for name, split in splits.items()}, measured, balance, findings)


def _sample(rows: int, most: int) -> np.ndarray:
    """Which rows are in a random sample of at most `most`, bool [rows]."""
    chosen = np.zeros(rows, np.bool_)
    chosen[np.random.default_rng(0).permutation(rows)[:most]] = True
    return chosen


def _coded(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """The number of each row's value, and the values."""
    values = column.unique()
    return pc.index_in(column, value_set=values).to_numpy(), values.to_pylist()


def _near_duplicates(
    name: str, split: Split, train: Split, sample: Mapping[int, str], has_classes: bool
) -> Iterator[Finding]:
    texts, numbers = split.some(_sample(len(split.rows), _MAX_HELD_OUT)), list(sample)
    held_out = list(texts)
    found = near_duplicates(list(sample.values()), list(texts.values()))
    if not found:
        return
    pairs = [(held_out[each.held_out], numbers[each.train]) for each in found]
    examples = [
        f"{split.rows.location(mine)} and {train.rows.location(other)}" for mine, other in pairs[:MAX_EXAMPLES]
    ]
    count, of, whole = len(pairs), len(held_out), len(train.rows)
    others = f"{len(sample):,} of {whole:,} training rows" if len(sample) < whole else "the training rows"
    labels = ""
    if has_classes:
        mine, theirs = split.rows.table["label"], train.rows.table["label"]
        differ = sum(mine[one].as_py() != theirs[other].as_py() for one, other in pairs)
        labels = f", {differ:,} of them with another label" if differ else ""
    note = (
        f"{split.rows.source}: {count:,} of {of:,} {name} rows ({count / of:.1%}) nearly repeat one of {others}"
        f"{labels}, such as {examples[0]}. Their scores will look too good."
    )
    yield Finding("near_duplicates", count, of, note, None, examples, count / of >= _MANY_NEAR)


def _sources(rows: StoredRows, sample: Mapping[int, str], problem_type: str | None) -> list[Finding]:
    of_label, labels = _coded(rows.table["label"])
    of_language, languages = _coded(rows.table["language"])
    parts = [names([label], problem_type) for label in labels]

    def known(row: int) -> dict[str, str]:
        return {"language": languages[of_language[row]]} | ({"file": rows.file(row)} if rows.files else {})

    return label_sources((text, known(row), list(parts[of_label[row]])) for row, text in sample.items())
