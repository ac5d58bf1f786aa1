"""Folders of runs that have all that a report shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from indictune.evaluation.breakdown import RowFacts, Scorer, as_json, break_down
from indictune.evaluation.scorers import answers, entities, numbers, one_label, several_labels
from indictune.evaluation.uncertainty import calibration_of
from tests.hub.folders import LABELS, METRICS, RECIPE, model_folder

TEXTS = {"hi": "यह अच्छा नहीं था", "te": "ఇది బాగా లేదు", "ta": "இது நன்றாக இல்லை"}
HEALTH = {
    "rows": {"train": 1200},
    "languages": [{"language": "hi", "rows": 700, "tokens_per_word": 2.25, "unknown_share": 0.125}],
    "labels": [{"language": "hi", "label": "negative", "count": 7, "share": 1.0}],
    "findings": [
        {"name": "near_duplicates", "language": None, "share": 0.5, "count": 1, "of": 2, "warns": True,
         "note": "train.csv: 1 of 2 test rows nearly repeat one.", "examples": ["an example"]},
    ],
}  # fmt: skip


def run_folder(folder: Path, languages: tuple[str, ...] = tuple(TEXTS), labels: tuple[str, ...] = LABELS,
               text: str | None = None, recipe: str = RECIPE, learns: float = 0.7) -> Path:  # fmt: skip
    """Of a classifier with 60 test rows, right as often as it `learns`, a curve, a baseline, mistakes and health."""
    random = np.random.default_rng(0)
    right = np.arange(60) % len(labels)
    predicted = np.where(random.random(60) < learns, right, (right + 1) % len(labels))
    of_row = [languages[row % len(languages)] for row in range(60)]
    logs = np.log(np.full((60, len(labels)), 0.3 / (len(labels) - 1)))
    logs[np.arange(60), predicted] = np.log(0.7)

    facts = RowFacts(of_row, ["native"] * 60, np.arange(60) + 1)
    found = break_down(
        "single_label",
        facts,
        one_label(right, predicted, labels),
        labels,
        calibration_of(logs, right == predicted, 1.5),
    )
    mistakes = [
        {"split": "test", "number": row, "row": f"/home/me/secret/test.csv:{row}", "language": language,
         "script": "native", "label": labels[0], "predicted": labels[1], "wrongness": 0.875,
         "text": text or TEXTS.get(language, "it was not good")}
        for row, language in enumerate(languages)
    ]  # fmt: skip
    log = [
        {"step": step, "loss": 1 / step, "learning_rate": 1e-4 * step, "samples_per_second": 100.5}
        for step in range(1, 41)
    ]
    made = model_folder(folder, recipe=recipe)
    write(made, "evaluation.json", as_json({"test": found}))
    write(made, "mistakes.json", {"test": mistakes})
    write(made, "baseline.json", baseline(0.6, 0.7, (0.05, 0.15)))
    write(made, "health.json", HEALTH)
    lines = "".join(json.dumps(row) + "\n" for row in log)
    (made / "train_log.jsonl").write_text(f'{lines}{{"step": 41, "loss": "nan"}}\n{{"step": 4', encoding="utf-8")
    return made


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def baseline(first: float, second: float, interval: tuple[float, float]) -> dict[str, Any]:
    """`baseline.json`: macro-F1 of the baseline and of the model, and the interval of the difference."""
    gap = {"value": second - first, "low": interval[0], "high": interval[1]}
    rows = {"train_rows": 900, "of_train_rows": 1200, "rows": 60, "of_rows": 60}
    scores = {"num_examples": 60, "first": first, "second": second, "difference": gap}
    return {
        "model": "n-grams",
        "split": "test",
        "seconds": 1.25,
        **rows,
        "overall": scores,
        "by_language": {"hi": scores},
    }


def of_kind(folder: Path, kind: str) -> Path:
    """Of a run of another task, with 12 rows of which each is a mistake."""
    rows, ones = np.arange(12.0), np.ones((12, 2), np.int64)
    tags = [[0, 1]] * 12
    scored: dict[str, Scorer] = {
        "regression": numbers(rows, rows[::-1]),
        "multi_label": several_labels(ones, 1 - ones, ["a", "b"]),
        "entities": entities(1 - np.array(tags), tags, [[True, True]] * 12, ["B-PER", "B-LOC"]),
        "answers": answers(rows + 1, rows + 1, rows),
    }
    predicted: dict[str, dict[str, Any]] = {
        "regression": {"label": 1.5, "predicted": -2.25},
        "multi_label": {"label": [], "predicted": ["a", "b"]},
        "entities": {"label": ["B-PER", "O"], "predicted": ["O", "O"]},
        "answers": {"num_tokens": 3, "num_right": 1},
    }
    facts = RowFacts(["hi", "ta"] * 6, None, np.arange(12) + 1)
    found = break_down(kind, facts, scored[kind], ["a", "b"], lower_is_better=kind == "answers")
    row = {"split": "test", "number": 0, "language": "hi", "text": "Asha came", "wrongness": 0.5, **predicted[kind]}
    if kind == "answers":
        written = break_down("written_answers", facts, scored["regression"])
        found = replace(found, written=written)
    made = model_folder(folder, METRICS | {"test": {"num_examples": 12, "loss": 0.5}})
    sample = {"split": "test", "prompt": "Who <are> you?", "reference": "A model.", "answer": "वह"}
    messages = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "कौन?"}]
    lines = [json.dumps(each) for each in (sample, sample | {"prompt": "<|user|>", "messages": messages})]
    (made / "samples.jsonl").write_text("\n".join([*lines, "{"]), encoding="utf-8")
    write(made, "evaluation.json", as_json({"test": found}))
    write(made, "mistakes.json", {"test": [row]})
    return made
