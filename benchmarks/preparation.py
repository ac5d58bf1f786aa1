"""Rows a second and memory of each stage from a file to tokens: ours next to plain `datasets`.

    OMP_NUM_THREADS=1 python -m benchmarks.preparation --repeats 1

Rows are random words of the built-in tweets. Each stage runs in its own process, ours and plain `datasets` in turns;
the table has medians. Plain `datasets` reads the same csv file, cleans nothing, and tokenises with
`Dataset.map(batched=True)`. The health is measured with the rows themselves as validation rows. All stages of 2M rows
take ten minutes on 2 cores.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.environment import environment, write_results
from indictune.console_text import table

SAMPLES = Path("indictune/data/samples/train.jsonl")
LABELS = ("negative", "neutral", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_LENGTH = 128
LOOK_EVERY_S = 0.05
Stages = dict[str, dict[str, Any]]

# In the order of a round, which alternates ours and plain; a later stage of ours finds the cache of the earlier ones.
STAGES = {
    "ours_read_and_clean": "read, clean, check, write",
    "plain_read": "Dataset.from_csv",
    "ours_tokenise": "tokenise, write",
    "plain_map": "Dataset.map",
    "ours_health": "measure the health of the rows",
    "ours_second_start": "both again, from the cache",
}


def words() -> list[str]:
    """All words of the built-in tweets, with repetitions."""
    with SAMPLES.open(encoding="utf-8") as lines:
        return [word for line in lines for word in json.loads(line)["text"].split()]


def write_rows(path: Path, number: int) -> None:
    """Write a csv file of random tweets of 5 to 30 words."""
    draw, known = random.Random(0), words()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(number):
            writer.writerow([" ".join(draw.choices(known, k=draw.randint(5, 30))), draw.choice(LABELS)])


def write_tokenizer(folder: Path, vocabulary_size: int) -> None:
    """Write a WordPiece tokenizer: characters and words of the tweets, filled up with pairs of words."""
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
    """Run a stage in this process: seconds without imports, and memory."""
    is_ours = stage.startswith("ours")
    importlib.import_module("indictune.data.text.tokenisation" if is_ours else "datasets")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    imported = _peak_bytes()
    with watched_children() as peaks:
        seconds = _run_ours(stage, rows, tokenizer) if is_ours else _run_plain(stage, rows, tokenizer, cache)
    found = {"seconds": seconds, "peak_bytes": _peak_bytes(), "imported_bytes": imported}
    return {**found, "largest_child_bytes": max(peaks.values(), default=0)}


def _run_ours(stage: str, rows: str, tokenizer: Any) -> float:
    from indictune.config.arguments import DataArguments
    from indictune.data.load_rows import load_splits
    from indictune.data.text.tokenisation import tokenise_splits

    started = time.perf_counter()
    splits = load_splits(DataArguments(train_file=rows))
    if stage == "ours_read_and_clean":
        return time.perf_counter() - started
    if stage == "ours_health":
        from indictune.data.health.row_health import measure

        started = time.perf_counter()
        train = splits.rows["train"]
        measure({"train": train, "validation": train}, tokenizer, MAX_LENGTH, splits.findings)
        return time.perf_counter() - started
    if stage == "ours_tokenise":
        started = time.perf_counter()
    tokenise_splits(splits, tokenizer, splits.labels, MAX_LENGTH)
    return time.perf_counter() - started


def _run_plain(stage: str, rows: str, tokenizer: Any, cache: str) -> float:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    started = time.perf_counter()
    dataset = Dataset.from_csv(rows, cache_dir=cache)
    if stage == "plain_read":
        return time.perf_counter() - started

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        input_ids = tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH)["input_ids"]
        labels = [LABELS.index(label) for label in batch["label"]]
        return {"input_ids": input_ids, "labels": labels, "length": [len(ids) for ids in input_ids]}

    started = time.perf_counter()
    dataset.map(encode, batched=True, remove_columns=["text", "label"], load_from_cache_file=False)
    return time.perf_counter() - started


@contextmanager
def watched_children() -> Iterator[dict[str, int]]:
    """Peak memory in bytes of each child process by its id, polled while the block runs.

    `getrusage` reports for a child at least the parent's own memory.
    """
    peaks: dict[str, int] = {}

    def look() -> None:
        for children in Path("/proc/self/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):
                for child in children.read_text(encoding="ascii").split():
                    with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
                        peaks[child] = _peak_bytes(child)  # the last value counts; before exec it is the parent's

    with polling(look, LOOK_EVERY_S):
        yield peaks


@contextmanager
def polling(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call a function repeatedly in a thread while the block runs."""
    over = threading.Event()

    def keep_polling() -> None:
        while not over.wait(every_s):
            look()

    watcher = threading.Thread(target=keep_polling)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _peak_bytes(process: str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def measure_once(rows: Path, tokenizer_folder: Path, stages: Sequence[str]) -> Stages:
    """Run stages from an empty cache, each in its own process."""
    measured: Stages = {}
    with tempfile.TemporaryDirectory(dir=rows.parent) as cache:
        for stage in (each for each in STAGES if each in stages):
            environ = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
            environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            environ |= {"INDICTUNE_CACHE": f"{cache}/ours", "HF_DATASETS_CACHE": f"{cache}/plain"}
            command = [sys.executable, "-m", "benchmarks.preparation", "--alone", stage, str(rows)]
            command += [str(tokenizer_folder), f"{cache}/plain"]
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
            measured[stage] = json.loads(done.stdout.splitlines()[-1])
    return measured


def medians(runs: list[Stages], rows: int) -> Stages:
    """Seconds, rows a second and peak memory of each stage."""
    found: Stages = {}
    for stage in runs[0]:
        seconds = [run[stage]["seconds"] for run in runs]
        found[stage] = {
            "seconds": round(statistics.median(seconds), 3),
            "seconds_of_each_run": [round(each, 3) for each in seconds],
            "rows_per_second": round(rows / statistics.median(seconds)),
            **{name: statistics.median(run[stage][name] for run in runs) for name in ("peak_bytes", "imported_bytes")},
            "largest_child_bytes": max(run[stage]["largest_child_bytes"] for run in runs),
        }
    return found


def stage_table(measured: Stages, rows: int, vocabulary_size: int) -> str:
    """The table of one number of rows and one vocabulary."""
    body = []
    for stage, of in measured.items():
        name = f"{stage.partition('_')[0]}: {STAGES[stage]}"
        memory = [f"{of[name] / 1e6:,.0f}" for name in ("peak_bytes", "imported_bytes", "largest_child_bytes")]
        body.append([name, f"{of['seconds']:.2f}", f"{of['rows_per_second']:,.0f}", *memory])
    title = f"{rows:,} rows, vocabulary {vocabulary_size:,}"
    return table([title, "seconds", "rows/s", "peak MB", "imports MB", "child MB"], body)


def main() -> None:
    """Measure each vocabulary and number of rows; write the result file after each vocabulary."""
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
                print(f"{stage_table(by_rows[number], number, size)}\n", flush=True)
        results["vocabularies"][size] = {"rows": by_rows}
        suffix = f"-vocabulary-{size}" if len(options.vocabularies) == 1 else ""
        print(write_results(f"preparation-{max(options.rows)}{suffix}", results), flush=True)


if __name__ == "__main__":
    main()
