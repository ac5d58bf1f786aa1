"""Macro-F1 on real tweets: the built-in architecture from random weights, an n-gram baseline and the majority label.

    OMP_NUM_THREADS=1 python -m benchmarks.real_tweets --data ../shared/data/sentiment

A tenth of each training file chooses the best epoch; the validation files are scored once, at the end. The baselines
train on the same cleaned rows, and on the few (under 1%) that are also in held-out files. `built_in` is `make demo`.
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

from benchmarks.environment import environment, write_results
from benchmarks.speed import SAMPLES, Row, write_rows
from indictune.data.cleaning import clean
from indictune.models.tiny_bert import Size, build

DEMO = "recipes/sentiment/demo.yaml"
RECIPE = "recipes/sentiment/small_from_scratch.yaml"
SIZE = Size(hidden_size=128, num_layers=2, vocab_size=8000)
FILES = ("hinglish_tweets", "tamil_codemix", "marathi_tweets")


def read(path: Path) -> list[Row]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def baselines(train: list[Row], test: list[Row]) -> dict[str, float]:
    """Macro-F1 of the most frequent label, and of naive Bayes on counts of 1 to 4 characters."""
    labels = [row["label"] for row in test]
    majority = Counter(row["label"] for row in train).most_common(1)[0][0]
    n_grams = make_pipeline(CountVectorizer(analyzer="char", ngram_range=(1, 4), min_df=2), MultinomialNB())
    n_grams.fit([clean(row["text"]) for row in train], [row["label"] for row in train])
    predicted = n_grams.predict([clean(row["text"]) for row in test])
    return {
        "majority": f1_score(labels, [majority] * len(labels), average="macro"),
        "n_gram_naive_bayes": f1_score(labels, predicted, average="macro"),
    }


def measure(flags: list[str], train: list[Row], test: list[Row], folder: Path) -> dict[str, Any]:
    """Train with the script; return its scores and those of the baselines."""
    command = ["scripts/train_sentiment.py", *flags, "--output_dir", str(folder / "run")]
    subprocess.run([sys.executable, *command], check=True)
    metrics = json.loads((folder / "run" / "metrics.json").read_text(encoding="utf-8"))
    tested = metrics["test"]
    scores = baselines(train, test) | {"indictune": tested["macro_f1"]}
    return {
        "command": " ".join(["python", *command]).replace(str(folder), "WORK"),
        "rows": {"train": len(train), "test": len(test)},
        "macro_f1": {name: round(score, 4) for name, score in scores.items()},
        "accuracy": round(tested["accuracy"], 4),
        "per_language_macro_f1": {name: round(row["macro_f1"], 4) for name, row in tested["per_language"].items()},
        "train": metrics["train"],
    }


def flags_of(rows: list[Row], test: list[Row], folder: Path) -> tuple[list[str], list[Row]]:
    """Build a model from the training texts and write the files; return the flags and the nine tenths to train on."""
    kept = rows[9::10]
    train = [row for index, row in enumerate(rows) if index % 10 != 9]
    build([clean(row["text"]) for row in train], folder / "model", SIZE)
    files = {"train": train, "validation": kept, "test": test}
    flags = ["--config", RECIPE, "--drop_leaked_rows", "true", "--model_name_or_path", str(folder / "model")]
    for name, part in files.items():
        flags += [f"--{name}_file", str(write_rows(part, folder / f"{name}.jsonl"))]
    return flags, train


def main() -> None:
    """Measure each set, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the jsonl files")
    options = parser.parse_args()
    files = {"built_in": (SAMPLES / "train.jsonl", SAMPLES / "test.jsonl")}
    files |= {
        name: (options.data / f"{name}.train.jsonl", options.data / f"{name}.validation.jsonl") for name in FILES
    }
    sets: dict[str, Any] = {}
    for name, (train_file, test_file) in files.items():
        rows, test = read(train_file), read(test_file)
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            flags, train = (["--config", DEMO], rows) if name == "built_in" else flags_of(rows, test, folder)
            sets[name] = measure(flags, train, test, folder)
        write_results("real-tweets", {"environment": environment(), "model": vars(SIZE), "sets": sets})
        print(name, sets[name]["macro_f1"])


if __name__ == "__main__":
    main()
