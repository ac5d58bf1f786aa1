"""Conversations a second from a file to packs of tokens, beside TRL's own preparation, and the memory each takes.

    OMP_NUM_THREADS=1 python -m benchmarks.chat_preparation

Rows are random words of the built-in tweets, a prompt and an answer each. Ours reads, checks, tokenises, marks the
answers' tokens and packs; a second start finds all that in the cache. TRL's way is `load_dataset("json")` and what
`SFTTrainer` then does on one process, or on two, with `packing` and `assistant_only_loss` until it could train; it
checks nothing. What it takes for 10 rows is the making of model and Trainer, and is left out where it is compared.
Every time is that of a process forked for it, so that no import counts; by turns, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import datasets
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.contenders import peak_memory_bytes
from benchmarks.environment import environment, write_results
from benchmarks.preparation import watched_children, words
from indictune.config.chat_arguments import ChatDataArguments
from indictune.console_text import table
from indictune.data.conversations import load_conversations
from indictune.data.prepare_chats import set_template, tokenise_splits
from indictune.models import builtin

MODEL = builtin.resolve("builtin:tiny-indic-llama")
MAX_LENGTH = 2048
STAGES = {"ours": "ours", "again": "ours, from the cache", "trl": "TRL", "trl_two": "TRL, 2 processes"}
FEW = "trl_few"


def write_rows(path: Path, number: int) -> None:
    """Prompts of 5 to 30 words, and answers of 5 to 200."""
    draw, known = random.Random(0), words()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            said = [" ".join(draw.choices(known, k=draw.randint(5, most))) for most in (30, 200)]
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
            file.write(json.dumps({"messages": turns}, ensure_ascii=False) + "\n")


def ours(rows: Path, cache: Path) -> int:
    """Packs of the rows."""
    os.environ["INDICTUNE_CACHE"] = str(cache)
    args = ChatDataArguments(train_file=str(rows), max_length=MAX_LENGTH, packing=True)
    splits, tokenizer = load_conversations(args), AutoTokenizer.from_pretrained(MODEL)
    return len(tokenise_splits(splits, tokenizer, set_template(tokenizer, splits, args), args).train)


def trls(rows: Path, cache: Path, processes: int | None) -> int:
    """Packs of the rows."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    args = SFTConfig(
        output_dir=str(cache / "out"),
        max_length=MAX_LENGTH,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=processes,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    dataset = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(cache / "datasets"))
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    packs: Any = SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer).train_dataset
    return len(packs)


def measure(stage: str, rows: Path, cache: Path) -> dict[str, float]:
    """In a process that was forked for it."""
    datasets.disable_progress_bars()
    before, start = peak_memory_bytes(), time.perf_counter()
    is_trls, processes = stage.startswith("trl"), 2 if stage.startswith("trl_two") else None
    with watched_children() as peaks:
        packs = trls(rows, cache / stage, processes) if is_trls else ours(rows, cache)
    found = {"seconds": time.perf_counter() - start, "peak_bytes": peak_memory_bytes() - before, "packs": packs}
    return {**found, "largest_child_bytes": max(peaks.values(), default=0)}


def compare(number: int, repeats: int) -> dict[str, Any]:
    """All stages by turns, each turn with an empty cache."""
    laps: dict[str, list[dict[str, float]]] = {stage: [] for stage in (*STAGES, FEW)}
    with tempfile.TemporaryDirectory() as work, get_context("fork").Pool(1, maxtasksperchild=1) as alone:
        write_rows(rows := Path(work) / "rows.jsonl", number)
        write_rows(few := Path(work) / "few.jsonl", 10)
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(dir=work) as cache:
                for stage, done in laps.items():
                    done.append(alone.apply(measure, (stage, few if stage == FEW else rows, Path(cache))))
    return {
        stage: {key: statistics.median(each[key] for each in done) for key in done[0]}
        | {"seconds_of_each_run": [each["seconds"] for each in done]}
        for stage, done in laps.items()
    }


def main() -> None:
    """Print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results = compare(arguments.rows, arguments.repeats)
    for stage, found in results.items():
        found["seconds_of_rows"] = found["seconds"] - (results[FEW]["seconds"] if stage.startswith("trl") else 0.0)
    body = [
        [
            name,
            f"{results[stage]['seconds']:.2f}",
            f"{results[stage]['seconds_of_rows']:.2f}",
            f"{arguments.rows / results[stage]['seconds_of_rows']:,.0f}",
            f"{results['trl']['seconds_of_rows'] / results[stage]['seconds_of_rows']:.2f}x",
            f"{results[stage]['peak_bytes'] / 1e6:,.0f}",
            f"{results[stage]['largest_child_bytes'] / 1e6:,.0f}",
            f"{results[stage]['packs']:,.0f}",
        ]
        for stage, name in STAGES.items()
    ]
    header = [
        f"{arguments.rows:,} conversations",
        "seconds",
        "of rows",
        "rows/s",
        "as fast as TRL",
        "memory MB",
        "child MB",
        "packs",
    ]
    print(table(header, body))
    settings = {"rows": arguments.rows, "repeats": arguments.repeats, "max_length": MAX_LENGTH}
    print(
        write_results(
            f"chat-preparation-{arguments.rows}",
            {"environment": environment(), "settings": settings, "stages": results},
        )
    )


if __name__ == "__main__":
    main()
