"""Rows a second of `indictune predict` next to transformers' text-classification pipeline at its best batch size.

    python -m benchmarks.predict

Both read the same raw texts, random words of the built-in tweets in the lengths of 25,540 real ones
(benchmarks/row_lengths.py), and give a label and all scores. Both use the same saved models, BERTs with random heads,
and the same number of threads. They alternate in one process for each model and number of threads. The table has
medians of laps, and the median ratio of neighbouring laps. Two idle cores take ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, pipeline
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.environment import environment, write_results
from benchmarks.preparation import words
from benchmarks.row_lengths import TWEETS, draw_lengths
from indictune.config.arguments import ModelArguments
from indictune.config.shared_arguments import ClassifierArguments
from indictune.console_text import table
from indictune.models.builtin import Size, build_tiny_bert, sample_rows
from indictune.models.load import load_tokenizer
from indictune.models.serving_model import serve_as_trained
from indictune.models.task_models import load_classifier as new_classifier
from indictune.prediction.labelled_rows import WINDOW_ROWS, label, text_batch
from indictune.prediction.served_classifier import load_served_classifier

BATCH_SIZES = (1, 4, 8, 16, 32, 64)
MAX_LENGTH = 128
LABELS = ["negative", "neutral", "positive"]

# The size of a model, and how many rows take a few seconds.
MODELS = {
    "2 layers x 128": (Size(), 2_000),
    "4 layers x 256": (Size(hidden_size=256, num_layers=4), 600),
    "6 layers x 384": (Size(hidden_size=384, num_layers=6), 240),
    "12 layers x 768": (Size(hidden_size=768, num_layers=12), 64),
}


def texts(number: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Random words, as many tokens a text as real tweets have."""
    draw, known = random.Random(0), words()
    tokens_of = [len(ids) for ids in tokenizer(known, add_special_tokens=False)["input_ids"]]
    found = []
    for length in draw_lengths(TWEETS, number, np.random.default_rng(0)):
        chosen, left = [], length - 2  # the special tokens
        while left > 0:
            index = draw.randrange(len(known))
            chosen.append(known[index])
            left -= tokens_of[index]
        found.append(" ".join(chosen))
    return found


def save_model(folder: Path, size: Size) -> None:
    """Save a classifier as the end of a training does."""
    build_tiny_bert([row["text"] for row in sample_rows("train.jsonl")], folder / "base", size)
    args = ModelArguments(str(folder / "base"))
    tokenizer = load_tokenizer(args)
    new_classifier(args, LABELS, tokenizer).save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)
    serve_as_trained(folder, tokenizer, AutoConfig.from_pretrained(folder), MAX_LENGTH)


def measure(folder: Path, rows: list[str], repeats: int) -> dict[str, Any]:
    """Rows a second of each repeat, by contender.

    The batch sizes of the pipeline are tried on half of the rows. The two fastest take part in all repeats.
    """
    classify: Any = pipeline("text-classification", str(folder), device="cpu", dtype=torch.float32)
    classifier = load_served_classifier(ClassifierArguments(model=str(folder), max_length=MAX_LENGTH))

    def by_pipeline(some: list[str], batch_size: int) -> float:
        return speed(lambda: classify(some, batch_size=batch_size, truncation=True, top_k=None), len(some))

    def by_predict(some: list[str]) -> float:
        windows = [some[start : start + WINDOW_ROWS] for start in range(0, len(some), WINDOW_ROWS)]
        return speed(lambda: [label(classifier, text_batch(window)) for window in windows], len(some))

    half = rows[: len(rows) // 2]
    by_predict(half)
    tried = {size: by_pipeline(half, size) for size in BATCH_SIZES}
    fastest = sorted(tried, key=tried.__getitem__)[-2:]
    laps: dict[str, list[float]] = {name: [] for name in ("predict", *map(str, fastest))}
    for _ in range(repeats):
        laps["predict"].append(by_predict(rows))
        for size in fastest:
            laps[str(size)].append(by_pipeline(rows, size))
    return {"pipeline_rows_per_second_by_batch_size": tried, "rows_per_second_of_each_lap": laps}


def speed(work: Callable[[], object], rows: int) -> float:
    """Rows a second."""
    began = time.perf_counter()
    work()
    return round(rows / (time.perf_counter() - began), 1)


def compare(name: str, repeats: int) -> dict[str, Any]:
    """What `measure` finds for a model, with the medians of its laps and of the ratios of laps."""
    size, number = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), size)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = texts(number, tokenizer)
        mean_tokens = statistics.mean(len(ids) for ids in tokenizer(rows, truncation=True)["input_ids"])
        found = measure(Path(folder), rows, repeats)
    laps = found["rows_per_second_of_each_lap"]
    medians = {name: statistics.median(of_laps) for name, of_laps in laps.items()}
    best = max(laps.keys() - {"predict"}, key=medians.__getitem__)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(laps["predict"], laps[best], strict=True))
    about = {"rows": number, "mean_tokens": round(mean_tokens, 1), "best_batch_size": int(best)}
    speeds = {"pipeline": medians[best], "predict": medians["predict"], "ratio": round(ratio, 2)}
    return {**found, **about, **speeds}


def compare_alone(threads: int, name: str, repeats: int) -> dict[str, Any]:
    """`compare` in a process with so many threads."""
    number = {name: str(threads) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}
    command = [sys.executable, "-m", "benchmarks.predict", "--alone", "--models", name, "--repeats", str(repeats)]
    done = subprocess.run(command, env={**os.environ, **number}, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        disable_progress_bar()  # type: ignore[no-untyped-call]
        set_verbosity_error()  # type: ignore[no-untyped-call]
        print(json.dumps(compare(asked.models[0], asked.repeats)))
        return
    results: dict[str, Any] = {"environment": environment(), "threads": {}}
    body = []
    for threads in asked.threads:
        results["threads"][threads] = of_models = {}
        for name in asked.models:
            of_models[name] = found = compare_alone(threads, name, asked.repeats)
            shown = [f"{found[each]:,.0f}" for each in ("pipeline", "predict")]
            body.append([str(threads), name, str(found["best_batch_size"]), *shown, f"{found['ratio']:.2f}"])
            print(*body[-1], sep=", ", file=sys.stderr)
    print(table(["threads", "model", "best batch size", "pipeline rows/s", "predict rows/s", "ratio"], body))
    print(write_results("predict", results))


if __name__ == "__main__":
    main()
