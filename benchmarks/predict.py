"""Rows a second of `indictune predict` next to transformers' text-classification pipeline at its best batch size.

    python -m benchmarks.predict

Both read the same raw texts, random words of the built-in tweets, and give a label and all scores. Both use the same
saved models, small BERTs with random heads. They alternate in one process; the table has medians. Other work on the
machine makes every figure useless: threads then wait for each other in each operation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, pipeline
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.environment import environment, write_results
from benchmarks.preparation import words
from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import PredictArguments
from indictune.console_text import table
from indictune.models.classifier import load_classifier as new_classifier
from indictune.models.load import load_tokenizer
from indictune.models.serving_tokenizer import serve_as_trained
from indictune.models.tiny_bert import Size, build, sample_rows
from indictune.prediction.classifier import load_classifier
from indictune.prediction.labelled_rows import label, text_batch
from indictune.prediction.texts import WINDOW_ROWS

BATCH_SIZES = (1, 8, 16, 32, 64, 128)
MAX_LENGTH = 128
SIZES = {"2 layers x 128": Size(), "4 layers x 256": Size(hidden_size=256, num_layers=4)}
LABELS = ["negative", "neutral", "positive"]


def texts(number: int) -> list[str]:
    """Random tweets of 5 to 30 words."""
    draw, known = random.Random(0), words()
    return [" ".join(draw.choices(known, k=draw.randint(5, 30))) for _ in range(number)]


def save_model(folder: Path, size: Size) -> None:
    """Save a classifier as the end of a training does."""
    build([row["text"] for row in sample_rows("train.jsonl")], folder / "base", size)
    args = ModelArguments(str(folder / "base"))
    tokenizer = load_tokenizer(args)
    new_classifier(args, LABELS, tokenizer).save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)
    serve_as_trained(folder, tokenizer, AutoConfig.from_pretrained(folder), MAX_LENGTH)


def measure(folder: Path, rows: list[str], repeats: int) -> dict[str, Any]:
    """Rows a second of each repeat, by contender. The pipeline has the batch size that is fastest on a few rows."""
    classify: Any = pipeline("text-classification", str(folder), device="cpu", dtype=torch.float32)
    classifier = load_classifier(PredictArguments(model=str(folder), max_length=MAX_LENGTH))

    def by_pipeline(some: list[str], batch_size: int) -> None:
        classify(some, batch_size=batch_size, truncation=True, top_k=None)

    def by_predict(some: list[str]) -> None:
        for start in range(0, len(some), WINDOW_ROWS):
            label(classifier, text_batch(some[start : start + WINDOW_ROWS]))

    by_predict(rows[:200])
    quarter = rows[: len(rows) // 4]
    of_sizes = {size: speed(lambda size=size: by_pipeline(quarter, size), len(quarter)) for size in BATCH_SIZES}  # type: ignore[misc]
    best = max(of_sizes, key=of_sizes.__getitem__)
    laps: dict[str, list[float]] = {"pipeline": [], "predict": []}
    for _ in range(repeats):
        laps["pipeline"].append(speed(lambda: by_pipeline(rows, best), len(rows)))
        laps["predict"].append(speed(lambda: by_predict(rows), len(rows)))
    return {
        "pipeline_rows_per_second_by_batch_size": of_sizes,
        "best_batch_size": best,
        "rows_per_second_of_each_lap": laps,
    }


def speed(work: Callable[[], object], rows: int) -> float:
    """Rows a second."""
    began = time.perf_counter()
    work()
    return rows / (time.perf_counter() - began)


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        found = {name: compared(Path(folder) / name, size, asked) for name, size in SIZES.items()}
    body = []
    for name, of_size in found.items():
        shown = [f"{each:,.0f}" for each in of_size["median_rows_per_second"].values()]
        body.append([name, str(of_size["best_batch_size"]), *shown, f"{of_size['ratio']:.2f}"])
    print(table(["model", "best batch size", "pipeline rows/s", "predict rows/s", "ratio"], body))
    write_results("predict", {**environment(), "rows": asked.rows, "models": found})


def compared(folder: Path, size: Size, asked: argparse.Namespace) -> dict[str, Any]:
    """What `measure` finds for a model of a size, with the medians and their ratio."""
    folder.mkdir()
    save_model(folder, size)
    rows = texts(asked.rows)
    lengths = [len(ids) for ids in AutoTokenizer.from_pretrained(folder)(rows)["input_ids"]]
    found = measure(folder, rows, asked.repeats)
    medians = {name: statistics.median(laps) for name, laps in found["rows_per_second_of_each_lap"].items()}
    ratio = medians["predict"] / medians["pipeline"]
    return {**found, "mean_tokens": statistics.mean(lengths), "median_rows_per_second": medians, "ratio": ratio}


if __name__ == "__main__":
    main()
