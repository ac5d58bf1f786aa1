"""A classifier of IndicBERT-v2's shape on a GPU: our recipe next to transformers' Trainer."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_torch_tf32_available

from benchmarks.contenders import MAX_LENGTH, Contender, Job
from benchmarks.row_lengths import TWEETS, draw_lengths
from benchmarks.runner import Measured, measure_each
from benchmarks.speed import grouped_by_length
from benchmarks.timed_parts import Note, Plan, show

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LABELS = ("negative", "neutral", "positive")
PLAIN_BATCH_SIZE = 64  # of `trainer_defaults`, in fp32; run_classification.py's default of 8 is slower still
BASELINES = ("trainer_defaults", "trainer_best", "ours")
RECIPE = Path(__file__).parents[1] / "recipes/sentiment/indicbert_v2.yaml"


@dataclass(frozen=True)
class Size:
    """The size of the comparison.

    Attributes:
        model: of the BertConfig.
        used_ids: tokens that rows draw from, an assumption: the fewer, the smaller our active vocabulary.
        global_batch_size: rows.
        rows: of the training file.
        rows_of_epoch: of `benchmarks/epoch.py`.
        steps_per_lap: timed together.
        laps: at most, and one to warm up.
        rate_of_curve: learning rate of `benchmarks/curves.py`.
        compiler: for `--torch_compile_backend`.
    """

    model: dict[str, Any]
    used_ids: int
    global_batch_size: int
    rows: int
    rows_of_epoch: int
    steps_per_lap: int
    laps: int
    rate_of_curve: float
    compiler: str


SIZES = {
    "full": Size(
        {"vocab_size": 250_000, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
        used_ids=60_000,
        global_batch_size=512,
        rows=45_056,
        rows_of_epoch=2_000_000,
        steps_per_lap=10,
        laps=6,
        rate_of_curve=2e-5,
        compiler="inductor",
    ),
    "tiny": Size(
        {"vocab_size": 2_000, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 192},
        used_ids=500,
        global_batch_size=16,
        rows=256,
        rows_of_epoch=300,
        steps_per_lap=1,
        laps=2,
        rate_of_curve=1e-3,
        compiler="eager",
    ),
}


def prepare(plan: Plan, note: Note) -> None:
    """Part: write the model and the rows for the other parts."""
    size = SIZES[plan.size]
    write_model(plan.folder / "model", size.model)
    lengths = write_rows(plan.folder / "train.jsonl", size)
    note({"rows": len(lengths), "tokens_per_row": round(float(lengths.mean()), 2), "model": size.model})


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a BERT with random weights, and a tokenizer that maps `w17` to the token 17."""
    torch.manual_seed(0)
    heads = shape["hidden_size"] // 64 or 1
    config = BertConfig(**shape, num_attention_heads=heads, pad_token_id=0, id2label=dict(enumerate(LABELS)))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    words = {token: number for number, token in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), shape["vocab_size"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(token, words[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        **names,
    ).save_pretrained(folder)


def write_rows(path: Path, size: Size, count: int | None = None) -> np.ndarray:
    """Write rows as long as tweets, with words by Zipf's law. Return their lengths in tokens."""
    generator = np.random.default_rng(0)
    lengths = draw_lengths(TWEETS, count or size.rows, generator).clip(min=3)  # with two special tokens
    ids = len(SPECIAL) + generator.permutation(size.model["vocab_size"] - len(SPECIAL))[: size.used_ids]
    frequency = 1 / np.arange(1, size.used_ids + 1)
    drawn = generator.choice(ids, int(lengths.sum()), p=frequency / frequency.sum())
    texts = np.split(drawn, lengths.cumsum()[:-1])
    with path.open("w", encoding="utf-8") as file:
        for number, (length, tokens) in enumerate(zip(lengths, texts, strict=True)):
            text = " ".join(f"w{token}" for token in tokens[: length - 2].tolist())
            file.write(json.dumps({"text": text, "label": LABELS[number % 3], "language": "hi"}) + "\n")
    return lengths


def recipe(size: Size) -> dict[str, Any]:
    """The settings of ours: those of the shipped recipe."""
    return {"config": RECIPE, "global_batch_size": size.global_batch_size}


def contenders(size: Size, grouped: tuple[int, ...]) -> list[Contender]:
    """Who runs: two baselines, ours, and ours with the padding put back.

    `ours_padded` has no lower limit of tokens than its largest padded batch: a limit would cut batches in two.
    """
    ours = recipe(size)
    padded = {**ours, "padding_free": "off", "max_tokens_per_device": size.global_batch_size * MAX_LENGTH}
    best = {
        "per_device_train_batch_size": size.global_batch_size,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 2,  # as the recipe
        "logging_nan_inf_filter": False,  # it would wait for each loss
        "accelerator_config": {"non_blocking": True},  # else each copy of a batch is waited for
        "tf32": is_torch_tf32_available(),
    }
    return [
        Contender("trainer_defaults", "max_length"),
        Contender("trainer_best", "longest", best, grouped),
        Contender("ours", settings=ours),
        Contender("ours_padded", settings=padded),
    ]


def compare(plan: Plan, note: Note) -> None:
    """Part: rows a second of each contender, and its time to the first step, imports included."""
    size = SIZES[plan.size]
    job = job_of(plan, "compare", (1 + size.laps) * size.steps_per_lap)
    rows = [json.loads(line) for line in job.train_file.read_text(encoding="utf-8").splitlines()]
    grouped = grouped_by_length(job.model, rows, 1 + size.laps, size.steps_per_lap, size.global_batch_size)
    _measure(contenders(size, grouped), plan, job, note)


def compare_compiled(plan: Plan, note: Note) -> None:
    """Part: ours, and ours compiled; the first lap, which compiles, does not count."""
    size = SIZES[plan.size]
    job = job_of(plan, "compiled", (1 + size.laps) * size.steps_per_lap)
    ours = recipe(size)
    compiled = {**ours, "torch_compile": "true", "torch_compile_backend": size.compiler}
    _measure([Contender("ours", settings=ours), Contender("ours_compiled", settings=compiled)], plan, job, note)


def job_of(plan: Plan, name: str, steps: int) -> Job:
    """The job of a part, with a separate folder and cache."""
    folder = plan.folder / name
    folder.mkdir()
    os.environ["INDICTUNE_CACHE"] = str(folder / "cache_of_ours")
    files = plan.folder / "model", plan.folder / "train.jsonl"
    return Job(*files, steps, SIZES[plan.size].steps_per_lap, folder)


def _measure(runs: Sequence[Contender], plan: Plan, job: Job, note: Note) -> None:
    """Measure the contenders; note the table after each."""
    size = SIZES[plan.size]
    lines: list[dict[str, Any]] = []
    for measured in measure_each(runs, job, size.laps, plan.deadline):
        lines.append(line_of(measured, size))
        note({"contenders": with_ratios(lines)})
    show(lines, COLUMNS)


def line_of(measured: Measured, size: Size) -> dict[str, Any]:
    """A contender's line of the table."""
    line: dict[str, Any] = {"contender": measured.title} | ({"error": measured.error} if measured.error else {})
    if not measured.laps:
        return line
    batch_size = PLAIN_BATCH_SIZE if measured.title == "trainer_defaults" else size.global_batch_size
    speeds = [size.steps_per_lap * batch_size / seconds for seconds in measured.laps]
    speed = statistics.median(speeds)
    return line | {
        "rows_per_second": round(speed, 1),
        "slowest_and_fastest_lap": [round(min(speeds), 1), round(max(speeds), 1)],
        "laps": len(speeds),
        "seconds_to_first_step": round(measured.seconds_to_first_step, 1),
        "padding_fraction": round(measured.counted["padding_fraction"], 4),
        "peak_memory_bytes": measured.counted["peak_memory_bytes"],
        "trained_vocabulary": measured.counted["trained_vocabulary"],
    }


def with_ratios(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each line its speed as a multiple of each baseline's."""
    for baseline in lines:
        if baseline["contender"] in BASELINES and "rows_per_second" in baseline:
            for line in lines:
                if "rows_per_second" in line:
                    ratio = line["rows_per_second"] / baseline["rows_per_second"]
                    line[f"times_{baseline['contender']}"] = round(ratio, 2)
    return lines


COLUMNS = {
    "rows_per_second": ("rows/s", "{:,.0f}"),
    "laps": ("laps", "{}"),
    "padding_fraction": ("padding", "{:.1%}"),
    "peak_memory_bytes": ("peak bytes", "{:.2e}"),
    "seconds_to_first_step": ("1st step s", "{:.1f}"),
    "times_trainer_defaults": ("x defaults", "{:.2f}"),
    "times_trainer_best": ("x best", "{:.2f}"),
    "times_ours": ("x ours", "{:.2f}"),
    "error": ("error", "{:.60}"),
}
