"""Rows a second of each stage between files and the first batch, beside plain `datasets`, and the memory each takes.

    OMP_NUM_THREADS=1 python -m benchmarks.preparation --repeats 1

Rows are random words of the built-in tweets. Every stage runs in a process of its own, ours and plain `datasets` by
turns; medians are shown, and of three or more numbers of rows the straight line through them. Plain `datasets` reads
the same csv file (`Dataset.from_csv`), cleans nothing, and tokenises by `Dataset.map(batched=True)` on one process and
on two. One round of all stages of 2M rows takes about ten minutes on 2 cores; that the cost of a row stays the same is
seen between sizes, so `--repeats 1` is enough for the line; a comparison takes the five of the default.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.environment import environment, write_results
from indictune.console_text import table

SAMPLES = Path("indictune/data/samples/train.jsonl")
LABELS = ("negative", "neutral", "positive")
MAX_LENGTH = 128
LOOK_EVERY_S = 0.05
ENDED = (FileNotFoundError, ProcessLookupError)  # of a process or thread in /proc
Stages = dict[str, dict[str, Any]]

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Stage: whose it is, and what must have run before it in the same folder.
STAGES = {
    "ours_read": "read alone, on one core",
    "ours_clean": "read and clean, on one core",
    "ours_read_and_clean": "read, clean, check, write",
    "ours_tokenise": "tokenise, write",
    "ours_second_start": "both again, from the cache",
    "plain_read": "Dataset.from_csv",
    "plain_map": "Dataset.map",
    "plain_map_two_processes": "Dataset.map(num_proc=2)",
}


def words() -> list[str]:
    """Of the built-in tweets, as often as they stand there."""
    with SAMPLES.open(encoding="utf-8") as lines:
        return [word for line in lines for word in json.loads(line)["text"].split()]


def write_rows(path: Path, number: int) -> None:
    """A csv file of random tweets of 5 to 30 words."""
    draw, known = random.Random(0), words()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(number):
            writer.writerow([" ".join(draw.choices(known, k=draw.randint(5, 30))), draw.choice(LABELS)])


def write_tokenizer(folder: Path, vocabulary_size: int) -> None:
    """A WordPiece tokenizer: all characters of the tweets, their words, and pairs of words to fill the vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = sorted(set(words()))
    letters = sorted(set("".join(known)))
    pieces = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters), *known])
    for first in known:
        for second in known:
            if len(pieces) >= vocabulary_size:
                break
            pieces[f"{first}{second}"] = None
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.save_pretrained(folder)


def run_stage(stage: str, rows: str, tokenizer_folder: str, cache: str) -> dict[str, float]:
    """In a process of its own: seconds of a stage without imports, peak memory, and the memory of the imports."""
    importlib.import_module("indictune.data.tokenisation" if stage.startswith("ours") else "datasets")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    imported = _peak_bytes()
    with watched_children() as peaks:
        seconds = _ours(stage, rows, tokenizer) if stage.startswith("ours") else _plain(stage, rows, tokenizer, cache)
    found = {"seconds": seconds, "peak_bytes": _peak_bytes(), "imported_bytes": imported}
    return {**found, "largest_child_bytes": max(peaks.values(), default=0)}


def _ours(stage: str, rows: str, tokenizer: Any) -> float:
    from indictune.config.arguments import DataArguments, TextArguments
    from indictune.data.bad_rows import BadRows
    from indictune.data.clean_batches import clean_batch
    from indictune.data.load_rows import load_splits
    from indictune.data.row_sources import file_source
    from indictune.data.tokenisation import tokenise_splits

    started = time.perf_counter()
    if stage in ("ours_read", "ours_clean"):
        batches = file_source(rows, "--train_file", TextArguments()).read(BadRows(rows))
        deque(map(clean_batch, batches) if stage == "ours_clean" else batches, maxlen=0)
        return time.perf_counter() - started
    splits = load_splits(DataArguments(train_file=rows))
    if stage == "ours_read_and_clean":
        return time.perf_counter() - started
    if stage == "ours_tokenise":
        started = time.perf_counter()
    tokenise_splits(splits, tokenizer, splits.labels, MAX_LENGTH)
    return time.perf_counter() - started


def _plain(stage: str, rows: str, tokenizer: Any, cache: str) -> float:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    started = time.perf_counter()
    dataset = Dataset.from_csv(rows, cache_dir=cache)
    if stage == "plain_read":
        return time.perf_counter() - started

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        input_ids = tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH)["input_ids"]
        return {
            "input_ids": input_ids,
            "labels": [LABELS.index(label) for label in batch["label"]],
            "length": [len(ids) for ids in input_ids],
        }

    started = time.perf_counter()
    processes = {"num_proc": 2} if stage == "plain_map_two_processes" else {}
    dataset.map(encode, batched=True, remove_columns=["text", "label"], load_from_cache_file=False, **processes)
    return time.perf_counter() - started


@contextmanager
def watched_children() -> Iterator[dict[str, int]]:
    """The peak memory of each child process by its id, as last seen; looked at again and again while the block lasts.

    `getrusage` would not do: what it tells of a child that was started is never less than the parent's own memory.
    """
    peaks: dict[str, int] = {}

    def look() -> None:
        for child in _children():
            with suppress(*ENDED, StopIteration):
                peaks[child] = _peak_bytes(child)  # the last counts: before its own program began, it was us

    with looking(look, LOOK_EVERY_S):
        yield peaks


@contextmanager
def looking(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """A block beside which a thread looks again and again."""
    over = threading.Event()

    def look_on() -> None:
        while not over.wait(every_s):
            look()

    watcher = threading.Thread(target=look_on)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _children() -> Iterator[str]:
    for of_thread in Path("/proc/self/task").glob("*/children"):
        with suppress(*ENDED):
            yield from of_thread.read_text(encoding="ascii").split()


def _peak_bytes(process: str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def measure_once(rows: Path, tokenizer_folder: Path, stages: Sequence[str]) -> Stages:
    """Stages, ours and plain by turns, from an empty cache."""
    measured: Stages = {}
    turns = (
        "ours_read",
        "ours_clean",
        "ours_read_and_clean",
        "plain_read",
        "ours_tokenise",
        "plain_map",
        "ours_second_start",
    )
    with tempfile.TemporaryDirectory(dir=rows.parent) as cache:
        for stage in (*turns, "plain_map_two_processes"):
            if stage not in stages:
                continue
            given = {"INDICTUNE_CACHE": f"{cache}/ours", "HF_DATASETS_CACHE": f"{cache}/plain"}
            variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **given}
            command = [sys.executable, "-m", "benchmarks.preparation", "--alone", stage, str(rows)]
            command += [str(tokenizer_folder), f"{cache}/plain"]
            environ = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
            if stage == "plain_map_two_processes":  # threads of both would stand in each other's way
                environ["TOKENIZERS_PARALLELISM"] = "false"
            done = subprocess.run(command, env={**environ, **variables}, stdout=subprocess.PIPE, text=True, check=True)
            measured[stage] = json.loads(done.stdout.splitlines()[-1])
    return measured


def medians(runs: list[Stages], rows: int) -> Stages:
    """Of each stage: seconds, rows a second, and peak memory."""
    found: Stages = {}
    for stage in runs[0]:
        seconds = statistics.median(run[stage]["seconds"] for run in runs)
        found[stage] = {
            "seconds": round(seconds, 3),
            "seconds_of_each_run": [round(run[stage]["seconds"], 3) for run in runs],
            "rows_per_second": round(rows / seconds),
            "peak_bytes": statistics.median(run[stage]["peak_bytes"] for run in runs),
            "imported_bytes": statistics.median(run[stage]["imported_bytes"] for run in runs),
            "largest_child_bytes": max(run[stage]["largest_child_bytes"] for run in runs),
        }
    return found


def lines_through(by_rows: dict[int, Stages]) -> Stages:
    """Of each stage of all: seconds whatever the rows, for a million more, and how far off the line is at most."""
    found: Stages = {}
    for stage in STAGES:
        if not all(stage in measured for measured in by_rows.values()):
            continue
        rows, seconds = list(by_rows), [measured[stage]["seconds"] for measured in by_rows.values()]
        slope, start = np.polyfit(rows, seconds, 1, w=1 / np.array(seconds))  # each size counts as much
        off = [abs(start + slope * number - took) / took for number, took in zip(rows, seconds, strict=True)]
        found[stage] = {
            "seconds_at_0_rows": round(start, 3),
            "seconds_per_million_rows": round(slope * 1e6, 2),
            "largest_deviation": round(max(off), 3),
        }
    return found


def shown(measured: Stages, rows: int, vocabulary_size: int) -> str:
    """The table of one number of rows and one vocabulary."""
    body = []
    for stage, of in measured.items():
        name = f"{stage.partition('_')[0]}: {STAGES[stage]}"
        memory = [f"{of[name] / 1e6:,.0f}" for name in ("peak_bytes", "imported_bytes", "largest_child_bytes")]
        body.append([name, f"{of['seconds']:.2f}", f"{of['rows_per_second']:,.0f}", *memory])
    header = [
        f"{rows:,} rows, vocabulary {vocabulary_size:,}",
        "seconds",
        "rows/s",
        "peak MB",
        "imports MB",
        "child MB",
    ]
    return table(header, body)


def main() -> None:
    """Measure every vocabulary and number of rows, and write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 500_000, 2_000_000])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[30_000, 250_000])
    parser.add_argument("--repeats", type=int, default=5, help="of each number of rows")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="to tokenise, clean before")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(run_stage(*options.alone)))
        return
    results: dict[str, Any] = {"environment": environment(), "repeats": options.repeats, "vocabularies": {}}
    for size in options.vocabularies:
        by_rows: dict[int, Stages] = {}
        with tempfile.TemporaryDirectory() as work:
            write_tokenizer(Path(work) / "tokenizer", size)
            for number in options.rows:
                rows = Path(work) / f"{number}.csv"
                write_rows(rows, number)
                runs = [measure_once(rows, Path(work) / "tokenizer", options.stages) for _ in range(options.repeats)]
                by_rows[number] = medians(runs, number)
                print(f"{shown(by_rows[number], number, size)}\n", flush=True)
        results["vocabularies"][size] = {"rows": by_rows}
        if len(by_rows) > 2:  # a line goes through any two points
            results["vocabularies"][size]["straight_line"] = lines_through(by_rows)
            print(json.dumps(lines_through(by_rows), indent=2), flush=True)
        name = f"preparation-{max(options.rows)}"
        if len(options.vocabularies) == 1:
            name += f"-vocabulary-{size}"
        print(write_results(name, results), flush=True)


if __name__ == "__main__":
    main()
