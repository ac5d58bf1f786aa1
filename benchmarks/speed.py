"""Rows a second of a small BERT on real tweets: ours next to transformers' Trainer, plain and at its best.

    python -m benchmarks.speed [--data ../shared/data/sentiment] [--steps 2] [--compile]

`trainer_defaults` is transformers' run_classification.py: rows padded to 128, fp32; with batches of 64, as all others.
`trainer_best` groups rows by length and computes in bf16. `ours_padded` is ours with the padding put back. Every
contender has its own process. They take turns, lap by lap, and the first lap of each is dropped; ratios compare laps
of the same round. The BERT has 4 layers x 256 and random weights; texts are cut to 128 tokens; all cores compute. The
vocabulary of 250,000 has 30,000 tokens learned from the tweets and rows that no tweet uses, as multilingual models do.

The losses of ours and of the Trainer on the same padded batches, in fp32 without dropout, must agree to 1e-4 and fall.
The program fails, after it has written its results, if they do not, or if `ours_padded` is not slower than ours.
`--steps` makes laps longer on an unsteady machine. `--compile` adds a compiled contender, and compares its losses.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers.trainer_pt_utils import get_length_grouped_indices

from benchmarks.compare_curves import judge, problems
from benchmarks.contenders import BATCH_SIZE, MAX_LENGTH, Contender, Job
from benchmarks.environment import environment, write_results
from benchmarks.runner import Runner, run_alone
from indictune.console_text import table
from indictune.data.text.cleaning import clean
from indictune.models.builtin import learn_vocabulary, make_tokenizer

SAMPLES = Path(__file__).parents[1] / "indictune/data/samples"
VOCABULARIES = (30_000, 250_000)
BASELINES = ("trainer_defaults", "trainer_best", "ours_fp32")
LAPS = 5
STEPS_OF_CURVE, ROWS_OF_CURVE = 36, 4 * BATCH_SIZE  # the rows are seen again and again
PADDED = 0.9  # largest speed of padded rows, as a share of ours
DRAWS = 1000  # candidates for a lap
FP32 = {"dropout": 0.0, "logging_steps": 1}
LEARNS = {**FP32, "learning_rate": 1e-3}  # from random weights, within a curve

Row = dict[str, str]


def read_tweets(data: Path) -> list[Row]:
    """Cleaned real tweets, or the built-in ones if there are none; as many as fill whole batches."""
    real = data / "hinglish_tweets.train.jsonl"
    path = real if real.exists() else SAMPLES / "train.jsonl"
    with path.open(encoding="utf-8") as lines:
        rows = [{**row, "text": clean(row["text"])} for row in map(json.loads, lines)]
    return rows[: len(rows) // BATCH_SIZE * BATCH_SIZE]


def write_model(folder: Path, rows: Sequence[Row], vocab_size: int) -> None:
    """Write a BERT with random weights and a head, and a tokenizer learned from the rows."""
    vocabulary = learn_vocabulary([row["text"] for row in rows], min(vocab_size, VOCABULARIES[0]))
    tokenizer = make_tokenizer(vocabulary, MAX_LENGTH)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(sorted({row["label"] for row in rows}))),
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def grouped_by_length(
    model: Path, rows: Sequence[Row], laps: int, steps_per_lap: int, batch_size: int = BATCH_SIZE, seed: int = 0
) -> tuple[int, ...]:
    """Row numbers in batches as `train_sampling_strategy: group_by_length` makes them, for laps like a whole epoch.

    The sampler begins with its longest batches, so a short run would see nothing else. Each lap gets a batch of each
    band of lengths instead: of many draws, the one with a mean padded length nearest to that of all batches.
    """
    lengths = lengths_of(model, rows)
    seeded = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(lengths, batch_size, generator=seeded)  # type: ignore[no-untyped-call]
    whole = len(order) // batch_size * batch_size
    batches = [order[start : start + batch_size] for start in range(0, whole, batch_size)]
    batches.sort(key=lambda batch: max(lengths[row] for row in batch), reverse=True)
    padded = np.array([max(lengths[row] for row in batch) for batch in batches])
    bands = np.array_split(np.arange(len(batches)), steps_per_lap)
    generator = np.random.default_rng(seed)
    chosen: list[int] = []
    for _ in range(laps):
        draws = np.stack([generator.choice(band, DRAWS) for band in bands], axis=1)
        chosen += draws[np.abs(padded[draws].mean(axis=1) - padded.mean()).argmin()].tolist()
    return tuple(row for number in chosen for row in batches[number])


def lengths_of(model: Path, rows: Sequence[Row]) -> list[int]:
    """Tokens of each row, cut to the maximal length."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [row["text"] for row in rows]
    return [len(ids) for ids in tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]]


def contenders(grouped: tuple[int, ...], compiled: bool = False) -> list[Contender]:
    """Who runs, in order."""
    best = {"bf16": True, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
    return [
        Contender("trainer_defaults", "max_length"),
        Contender("trainer_best", "longest", best, grouped),
        Contender("ours_fp32"),
        Contender("ours_bf16", settings={"bf16": "true"}),
        Contender("ours_padded", settings={"padding_free": "off"}),
        Contender("ours_whole_vocabulary", settings={"active_vocabulary": "off"}),
        *([Contender("ours_compiled", settings={"bf16": "true", "torch_compile": "true"})] if compiled else []),
    ]


def compare(
    rows: Sequence[Row], vocab_size: int, folder: Path, steps_per_lap: int, compiled: bool
) -> list[dict[str, Any]]:
    """The lines of the table for one vocabulary."""
    model, train_file = folder / "model", write_rows(rows, folder / "train.jsonl")
    write_model(model, rows, vocab_size)
    job = Job(model, train_file, (1 + LAPS) * steps_per_lap, steps_per_lap, folder)
    grouped = grouped_by_length(model, rows, 1 + LAPS, steps_per_lap)
    with ThreadPoolExecutor(2) as pool:
        runners = list(pool.map(lambda contender: Runner(contender, job), contenders(grouped, compiled)))
    laps = [[runner.lap() for runner in runners] for _ in range(1 + LAPS)][1:]
    lines = []
    for number, runner in enumerate(runners):
        speeds = [steps_per_lap * BATCH_SIZE / seconds[number] for seconds in laps]
        counted = runner.finish()
        lines.append(
            {
                "contender": runner.title,
                "rows_per_second": round(statistics.median(speeds), 1),
                "rows_per_second_of_each_lap": [round(speed, 1) for speed in speeds],
                "padding_fraction": round(counted["padding_fraction"], 4),
                "tokens_per_row": round(counted["tokens_per_row"], 1),
                "peak_memory_bytes": counted["peak_memory_bytes"],
                "trained_vocabulary": counted["trained_vocabulary"],
            }
        )
    return with_ratios(lines)


def with_ratios(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each line its speed as a multiple of each baseline's, lap by lap."""
    name = "rows_per_second_of_each_lap"
    baselines = [line for line in lines if line["contender"] in BASELINES]
    for line in lines:
        for baseline in baselines:
            ratios = [round(one / other, 2) for one, other in zip(line[name], baseline[name], strict=True)]
            line[f"times_{baseline['contender']}"] = ratios
    return lines


def padding_problems(lines: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong if others of ours than `ours_padded` pad, or if padding costs no speed."""
    ours = [line for line in lines if line["contender"].startswith("ours")]
    found = []
    if (pad := [line["contender"] for line in ours if line["padding_fraction"] > 0]) != ["ours_padded"]:
        found.append(f"of ours, {pad} pad, where ours_padded alone should")
    (ratios,) = (line["times_ours_fp32"] for line in ours if line["contender"] == "ours_padded")
    if statistics.median(ratios) > PADDED:
        found.append(f"ours_padded is {median_and_range(ratios)} times as fast as ours_fp32")
    return found


def write_rows(rows: Sequence[Row], path: Path) -> Path:
    """Write rows as JSON lines; return the path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def compare_losses(rows: Sequence[Row], folder: Path, compiled: bool) -> dict[int, dict[str, Any]]:
    """The losses of ours, and of the Trainer on the same padded batches, in fp32 without dropout, by vocabulary."""
    settings = LEARNS | ({"torch_compile": "true"} if compiled else {})
    train_file = write_rows(rows[:ROWS_OF_CURVE], folder / "train.jsonl")
    found = {}
    for vocab_size in VOCABULARIES:
        own = folder / str(vocab_size)
        own.mkdir()
        write_model(own / "model", rows, vocab_size)
        job = Job(own / "model", train_file, STEPS_OF_CURVE, STEPS_OF_CURVE, own)
        ours = run_alone(Contender("curve_of_ours", settings=settings), job)
        plain = run_alone(Contender("curve_of_trainer", "longest", LEARNS, tuple(ours["order"])), job)
        curves = {"steps": job.steps, "ours": ours["losses"], "trainer": plain["losses"]}
        found[vocab_size] = curves | judge(ours["losses"], plain["losses"])
    return found


def show(vocab_size: int, lines: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    columns = ["rows/s", "padding", "tokens/row", "peak MB", "x defaults", "x best", "x ours fp32"]
    body = [
        [
            line["contender"],
            f"{line['rows_per_second']:.1f}",
            f"{line['padding_fraction']:.1%}",
            f"{line['tokens_per_row']:.1f}",
            f"{line['peak_memory_bytes'] / 1e6:,.0f}",
            *(median_and_range(line[f"times_{baseline}"]) for baseline in BASELINES),
        ]
        for line in lines
    ]
    print(table([f"vocabulary {vocab_size:,}", *columns], body), end="\n\n", flush=True)


def median_and_range(ratios: Sequence[float]) -> str:
    """As `median (least-largest)`."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Measure, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    parser.add_argument("--steps", type=int, default=2, help="steps of a lap")
    parser.add_argument("--compile", action="store_true", help="measure a compiled model too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    rows = read_tweets(options.data)
    results: dict[str, Any] = {"environment": environment(), "rows": len(rows)}
    with tempfile.TemporaryDirectory() as work:
        results |= compare_speeds(rows, Path(work), options.steps, options.compile)
    name = "speed-compiled" if options.compile else "speed"
    if options.steps != parser.get_default("steps"):
        name += f"-laps-of-{options.steps}"
    print(f"written to {write_results(name, results)}")
    if found := problems_of(results):
        raise SystemExit(f"This shows nothing: {'; '.join(found)}.")


def problems_of(results: dict[str, Any]) -> list[str]:
    """Why the results show nothing: padding costs no speed, or losses do not agree or fall."""
    found = [problem for lines in results["speed"].values() for problem in padding_problems(lines)]
    return found + [problem for curve in results["losses"].values() for problem in problems(curve)]


def compare_speeds(rows: Sequence[Row], work: Path, steps: int, compiled: bool) -> dict[str, Any]:
    """Measure all vocabularies and print their tables; compare the losses."""
    speeds = {}
    for vocab_size in VOCABULARIES:
        folder = work / str(vocab_size)
        folder.mkdir()
        speeds[vocab_size] = compare(rows, vocab_size, folder, steps, compiled)
        show(vocab_size, speeds[vocab_size])
    folder = work / "losses"
    folder.mkdir()
    losses = compare_losses(rows, folder, compiled)
    for vocab_size, curve in losses.items():
        print(f"vocabulary {vocab_size:,}: losses in fp32 differ by {curve['largest']:.1e} at most")
    return {"laps": LAPS, "steps_of_a_lap": steps, "speed": speeds, "losses": losses}


if __name__ == "__main__":
    main()
