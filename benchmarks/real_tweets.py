"""Macro-F1 on real tweets: the built-in architecture from random weights, beside an n-gram baseline and the majority.

    OMP_NUM_THREADS=1 python -m benchmarks.real_tweets --data ../shared/data/sentiment

A tenth of each training file is kept for choosing the best epoch; the files named validation are scored once, at the
end. The baselines see the same cleaned training rows, and also the few (under 1%) that stand in the held-out files too
and are taken from ours. `built_in` is `make demo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics import f1_score
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

from benchmarks.environment import environment, results_path
from indictune.data.cleaning import clean
from indictune.models.tiny_bert import Size, build

DEMO = "recipes/sentiment/demo.yaml"
RECIPE = "recipes/sentiment/small_from_scratch.yaml"
SIZE = Size(hidden_size=128, num_layers=2, vocab_size=8000)
FILES = ("hinglish_tweets", "tamil_codemix", "marathi_tweets")

# Tamil comments know two labels more than the others; rows of those are left out where all three are one data set.
COMMON_LABELS = {
    "positive": "positive",
    "Positive": "positive",
    "negative": "negative",
    "Negative": "negative",
    "neutral": "neutral",
    "unknown_state": "neutral",
}

Row = dict[str, str]


def read(data: Path, name: str, split: str) -> list[Row]:
    """The rows of one file."""
    with (data / f"{name}.{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def with_common_labels(rows: list[Row]) -> list[Row]:
    """The rows whose label all three sets know, under its common name."""
    return [{**row, "label": COMMON_LABELS[row["label"]]} for row in rows if row["label"] in COMMON_LABELS]


def data_sets(data: Path) -> dict[str, tuple[list[Row], list[Row]]]:
    """Training and test rows of each set, and of the three together."""
    sets = {name: (read(data, name, "train"), read(data, name, "validation")) for name in FILES}
    together = tuple(with_common_labels([row for rows in sets.values() for row in rows[part]]) for part in (0, 1))
    return {**sets, "all_three": (together[0], together[1])}


def write(rows: list[Row], path: Path) -> str:
    """Write rows as jsonl; returns the path, for a command line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def baselines(train: list[Row], test: list[Row]) -> dict[str, float]:
    """Macro-F1 of the most frequent label, and of naive Bayes on counts of 1 to 4 characters."""
    labels = [row["label"] for row in test]
    texts = [clean(row["text"]) for row in train]
    majority = Counter(row["label"] for row in train).most_common(1)[0][0]
    n_grams = make_pipeline(CountVectorizer(analyzer="char", ngram_range=(1, 4), min_df=2), MultinomialNB())
    n_grams.fit(texts, [row["label"] for row in train])
    predicted = n_grams.predict([clean(row["text"]) for row in test])
    return {
        "majority": f1_score(labels, [majority] * len(labels), average="macro"),
        "n_gram_naive_bayes": f1_score(labels, predicted, average="macro"),
    }


def fine_tune(flags: list[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """Train by the script; the typed command, and what its `metrics.json` says."""
    command = ["python", "scripts/train_sentiment.py", *flags, "--output_dir", str(folder / "run")]
    subprocess.run([sys.executable, *command[1:]], check=True)
    metrics = json.loads((folder / "run" / "metrics.json").read_text(encoding="utf-8"))
    return " ".join(command).replace(str(folder), "WORK"), metrics


def report(command: str, metrics: dict[str, Any], train: list[Row], test: list[Row]) -> dict[str, Any]:
    """One data set's part of the result file."""
    scores = {name: round(score, 4) for name, score in baselines(train, test).items()}
    tested = metrics["test"]
    return {
        "command": command,
        "rows": {"train": len(train), "test": len(test)},
        "macro_f1": {**scores, "indictune": round(tested["macro_f1"], 4)},
        "accuracy": round(tested["accuracy"], 4),
        "per_language_macro_f1": {name: round(row["macro_f1"], 4) for name, row in tested["per_language"].items()},
        "train": metrics["train"],
    }


def measure_built_in(folder: Path) -> dict[str, Any]:
    """`make demo`."""
    command, metrics = fine_tune(["--config", DEMO], folder)
    samples = Path("indictune/data/samples")
    train, test = ([json.loads(line) for line in (samples / f"{split}.jsonl").open()] for split in ("train", "test"))
    return report(command, metrics, train, test)


def measure(rows: list[Row], test: list[Row], folder: Path) -> dict[str, Any]:
    """A model made from the training texts, trained on nine tenths of the rows."""
    kept = [row for index, row in enumerate(rows) if index % 10 == 9]
    train = [row for index, row in enumerate(rows) if index % 10 != 9]
    build([clean(row["text"]) for row in train], folder / "model", SIZE)
    flags = [
        *("--config", RECIPE, "--drop_leaked_rows", "true", "--model_name_or_path", str(folder / "model")),
        *("--train_file", write(train, folder / "train.jsonl")),
        *("--validation_file", write(kept, folder / "kept.jsonl")),
        *("--test_file", write(test, folder / "test.jsonl")),
    ]
    return report(*fine_tune(flags, folder), train, test)


def main() -> None:
    """Measure every set, one after the other, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the jsonl files")
    parser.add_argument("--results", type=Path, default=results_path("real-tweets"), help="the JSON file to write")
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "model": vars(SIZE), "sets": {}}
    for name, (train, test) in {"built_in": ([], []), **data_sets(options.data)}.items():
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            part = measure_built_in(folder) if name == "built_in" else measure(train, test, folder)
        results["sets"][name] = part
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(name, part["macro_f1"])


if __name__ == "__main__":
    main()
