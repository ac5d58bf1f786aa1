"""Macro-F1 on real tweets: the built-in architecture from random weights beside the best of two n-gram baselines.

    OMP_NUM_THREADS=1 python -m benchmarks.real_tweets --data ../shared/data/sentiment

A tenth of each training file chooses the best epoch, and the baselines' weights of labels; the validation files are
scored once, at the end. All train on the same cleaned rows. The baselines also train on the few (under 1%) that are in
held-out files too. `built_in` is `make demo`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.metrics import f1_score
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.svm import LinearSVC

from benchmarks.environment import environment, write_results
from benchmarks.speed import SAMPLES, Row, write_rows
from indictune.data.text.cleaning import clean

DEMO = "recipes/sentiment/demo.yaml"
RECIPE = "recipes/sentiment/small_from_scratch.yaml"
FILES = ("hinglish_tweets", "tamil_codemix", "marathi_tweets")


def read(path: Path) -> list[Row]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def naive_bayes() -> Pipeline:
    """On counts of 1 to 4 characters."""
    return make_pipeline(CountVectorizer(analyzer="char", ngram_range=(1, 4), min_df=2), MultinomialNB())


def linear_svm(class_weight: str | None) -> Pipeline:
    """On weighted counts of 2 to 5 characters within words."""
    counts = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), min_df=2, sublinear_tf=True)
    return make_pipeline(counts, LinearSVC(C=0.5, class_weight=class_weight))


def baselines(train: list[Row], kept: list[Row], test: list[Row]) -> dict[str, float]:
    """Macro-F1 of naive Bayes, and of the linear SVM with the weights of labels that are best on the kept rows."""
    texts = {name: [clean(row["text"]) for row in rows] for name, rows in (("kept", kept), ("test", test))}
    labels = {"kept": [row["label"] for row in kept], "test": [row["label"] for row in test]}
    found = {}
    for name, candidates in {
        "naive_bayes": [naive_bayes()],
        "linear_svm": [linear_svm(None), linear_svm("balanced")],
    }.items():
        scores = []
        for each in candidates:
            each.fit([clean(row["text"]) for row in train], [row["label"] for row in train])
            of_split = [f1_score(labels[split], each.predict(texts[split]), average="macro") for split in texts]
            scores.append(tuple(of_split))
        found[name] = max(scores)[1]
    return found


def measure(flags: list[str], train: list[Row], kept: list[Row], test: list[Row], folder: Path) -> dict[str, Any]:
    """Train with the script; return its scores and those of the baselines."""
    command = ["scripts/train_sentiment.py", *flags, "--output_dir", str(folder / "run")]
    subprocess.run([sys.executable, *command], check=True)
    metrics = json.loads((folder / "run" / "metrics.json").read_text(encoding="utf-8"))
    tested, scores = metrics["test"], baselines(train, kept, test)
    return {
        "command": " ".join(["python", *command]).replace(str(folder), "WORK"),
        "rows": {"train": len(train), "kept": len(kept), "test": len(test)},
        "macro_f1": {name: round(score, 4) for name, score in (scores | {"indictune": tested["macro_f1"]}).items()},
        "ahead_of_the_best_baseline": round(tested["macro_f1"] - max(scores.values()), 4),
        "accuracy": round(tested["accuracy"], 4),
        "per_language_macro_f1": {name: round(row["macro_f1"], 4) for name, row in tested["per_language"].items()},
        "train": metrics["train"],
    }


def flags_of(train: list[Row], kept: list[Row], test: list[Row], folder: Path) -> list[str]:
    """Write the rows; return the flags of a run on them."""
    flags = ["--config", RECIPE, "--drop_leaked_rows", "true"]
    for name, part in {"train": train, "validation": kept, "test": test}.items():
        flags += [f"--{name}_file", str(write_rows(part, folder / f"{name}.jsonl"))]
    return flags


def main() -> None:
    """Measure each set, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the jsonl files")
    parser.add_argument("--sets", nargs="+", default=["built_in", *FILES], help="which of the sets, or built_in")
    options = parser.parse_args()
    sets: dict[str, Any] = {}
    for name in options.sets:
        if name == "built_in":
            train, kept, test = (read(SAMPLES / f"{split}.jsonl") for split in ("train", "validation", "test"))
        else:
            rows, test = (read(options.data / f"{name}.{split}.jsonl") for split in ("train", "validation"))
            train, kept = [row for index, row in enumerate(rows) if index % 10 != 9], rows[9::10]
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            flags = ["--config", DEMO] if name == "built_in" else flags_of(train, kept, test, folder)
            sets[name] = measure(flags, train, kept, test, folder)
        write_results("real-tweets", {"environment": environment(), "sets": sets})
        print(name, sets[name]["macro_f1"])


if __name__ == "__main__":
    main()
