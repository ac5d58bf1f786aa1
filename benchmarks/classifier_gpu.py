"""A classifier of IndicBERT-v2's shape on a GPU: ours by its recipe, beside transformers' Trainer."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_torch_tf32_available

from benchmarks.contenders import MAX_LENGTH, Contender, Job, compete
from benchmarks.flops import classifier_flops, matmul_flops_per_second
from benchmarks.parts import Note, Plan
from benchmarks.row_lengths import TWEETS, draw_lengths
from benchmarks.speed import grouped_by_length
from benchmarks.turns import ENOUGH_LAPS, Race, tell_few_laps, tell_whether_padding_is_seen

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LABELS = ("negative", "neutral", "positive")
ROWS_OF_THE_GOAL = 2_000_000
# Of the Trainer as run_classification.py has it, padded to 128 and in fp32; its default of 8 rows is slower still.
PLAIN_BATCH_SIZE = 64
IN_FP32 = ("trainer_defaults", "ours_fp32")  # others are in bf16
BASELINES = ("trainer_defaults", "trainer_best", "ours")
WITHOUT_DROPOUT = {"dropout": 0.0}  # torch's attention for joined rows is taken then, which has none
RECIPE = Path(__file__).parents[1] / "recipes/sentiment/indicbert_v2.yaml"
# What both sides import. Who starts first would compile it, and read it and the GPU's libraries from the disk.
WARM_UP = """
import torch
from accelerate.utils import is_deepspeed_available
if is_deepspeed_available():
    import deepspeed  # as accelerate does
from datasets import load_dataset
from transformers import BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast, Trainer
from benchmarks import contenders
from scripts import train_sentiment
torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
"""


@dataclass(frozen=True)
class Size:
    """How large the comparison is.

    Attributes:
        model: of the BertConfig.
        used_ids: tokens that the rows draw from, by assumption: the fewer they are, the more `ours` leaves out of what
            it trains (`trained_vocabulary`), and `ours_whole_vocabulary` does not.
        global_batch_size: rows.
        rows: of the training file.
        rows_of_epoch: of `benchmarks/epoch.py`.
        steps_per_lap: timed.
        steps_per_lap_of: likewise, of those that take so long that fewer will do, by their titles.
        warm_up_steps: before each lap.
        laps: at most.
        rate_of_curve: at which the model learns from random weights in the steps of `benchmarks/classifier_losses.py`.
        matmul_width: of the product that tells the device's speed.
        compiler: of `--torch_compile_backend`.
    """

    model: dict[str, Any]
    used_ids: int
    global_batch_size: int
    rows: int
    rows_of_epoch: int
    steps_per_lap: int
    steps_per_lap_of: dict[str, int]
    warm_up_steps: int
    laps: int
    rate_of_curve: float
    matmul_width: int
    compiler: str


SIZES = {
    "full": Size(
        {"vocab_size": 250_000, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
        used_ids=60_000,
        global_batch_size=512,
        rows=45_056,
        rows_of_epoch=ROWS_OF_THE_GOAL,
        steps_per_lap=10,
        steps_per_lap_of={"trainer_defaults": 8, "ours_fp32": 3},
        warm_up_steps=2,
        laps=6,
        rate_of_curve=2e-5,
        matmul_width=8192,
        compiler="inductor",
    ),
    "tiny": Size(
        {"vocab_size": 2_000, "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 192},
        used_ids=500,
        global_batch_size=16,
        rows=256,
        rows_of_epoch=300,
        steps_per_lap=1,
        steps_per_lap_of={},
        warm_up_steps=1,
        laps=2,
        rate_of_curve=1e-3,
        matmul_width=256,
        compiler="eager",
    ),
}


def prepare(plan: Plan, note: Note) -> None:
    """A part: the device's speed; the model, the rows and warm files for the parts that follow."""
    size = SIZES[plan.size]
    flops = matmul_flops_per_second(size.matmul_width)
    note({"bf16_matmul_tflops": round(flops / 1e12, 3), "matmul_width": size.matmul_width})
    (plan.folder / "flops.json").write_text(json.dumps(flops), encoding="utf-8")
    write_model(plan.folder / "model", size.model)
    subprocess.run([sys.executable, "-c", WARM_UP], check=True)
    lengths = write_rows(plan.folder / "train.jsonl", size)
    note({"rows": len(lengths), "tokens_per_row": round(float(lengths.mean()), 2), "model": size.model})
    print(f"bf16 product of {size.matmul_width} x {size.matmul_width}: {flops / 1e12:.1f} TFLOP/s", flush=True)


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """A BERT from random weights with a head, and a tokenizer that takes `w17` for the token 17."""
    torch.manual_seed(0)
    heads = shape["hidden_size"] // 64 or 1
    labels = dict(enumerate(LABELS))
    config = BertConfig(**shape, num_attention_heads=heads, pad_token_id=0, id2label=labels)
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


def write_rows(path: Path, size: Size) -> np.ndarray:
    """Rows as long as tweets, of words as frequent as words are (Zipf's law); returns their lengths in tokens."""
    generator = np.random.default_rng(0)
    lengths = draw_lengths(TWEETS, size.rows, generator).clip(min=3)  # with two special tokens
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
    """The settings of ours: all that the recipe for this model says, but for the model and the rows."""
    return {"config": RECIPE, "global_batch_size": size.global_batch_size}


def contenders(size: Size, grouped: tuple[int, ...]) -> list[Contender]:
    """Who runs, in this order: what is compared with first, then the padding put back, which must show.

    All of it is: the recipe's limit of tokens would cut a padded batch in two, of rows of like length each. The memory
    is that of `trainer_best`, whose longest batches have as many places.
    """
    ours = recipe(size)
    padded = {**ours, "padding_free": "off", "max_tokens_per_device": size.global_batch_size * MAX_LENGTH}
    best = {
        "per_device_train_batch_size": size.global_batch_size,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 2,  # as many as the recipe has
        "logging_nan_inf_filter": False,  # which would wait for every loss
        "accelerator_config": {"non_blocking": True},  # else each batch's copy is waited for
        "tf32": is_torch_tf32_available(),
    }
    return [
        Contender("trainer_defaults", "max_length"),
        Contender("trainer_best", "longest", best, grouped),
        Contender("ours", settings=ours),
        Contender("ours_padded", settings=padded),
        Contender("ours_without_dropout", settings={**ours, **WITHOUT_DROPOUT}),
        Contender("ours_whole_vocabulary", settings={**ours, "active_vocabulary": "off"}),
        Contender("ours_fp32", settings={**ours, "bf16": "false", "tf32": "false"}),
    ]


def compare(plan: Plan, note: Note) -> None:
    """A part: rows a second, by turns. Time to the first step counts from the start of the process, imports included.

    It is told of those that others are compared with, which start alone. Then the others start side by side: they find
    the rows in the cache, where the first of ours, which has tokenised them, has put them.
    """
    size = SIZES[plan.size]
    job = job_of(plan, "compare", _steps(size))
    laps = 1 + size.laps, size.steps_per_lap
    grouped = grouped_by_length(job.model, _rows(job), *laps, size.global_batch_size, size.warm_up_steps)
    runs = contenders(size, grouped)
    entries = [(each, _with_steps_of(each.title, job, size)) for each in runs]
    race = Race(compete, plan.start, plan.deadline)
    alone = len(BASELINES)
    race.enter_all(entries[:alone], at_once=1)
    race.enter_all(entries[alone:], at_once=len(entries) - alone)
    run_race(race, runs, plan, job, note)


def compare_compiled(plan: Plan, note: Note) -> None:
    """A part: ours compiled, beside ours. Compiling takes a minute or more, and is left out with the first lap."""
    size = SIZES[plan.size]
    job = job_of(plan, "compiled", _steps(size))
    ours = recipe(size)
    compiled = {**ours, "torch_compile": "true", "torch_compile_backend": size.compiler}
    runs = [Contender("ours", settings=ours), Contender("ours_compiled", settings=compiled)]
    race = Race(compete, plan.start, plan.deadline, patience_s=plan.left())
    race.enter_all([(each, job) for each in runs], at_once=1)
    run_race(race, runs, plan, job, note)


def run_race(race: Race, runs: Sequence[Contender], plan: Plan, job: Job, note: Note) -> None:
    """Let those that have entered run, and tell the table after each round and at the end."""
    size = SIZES[plan.size]
    lengths = _lengths(_rows(job))
    flops_per_row = classifier_flops(BertConfig.from_pretrained(job.model), lengths) / len(lengths)
    tokens_per_row = float(lengths.mean())
    device = json.loads((plan.folder / "flops.json").read_text(encoding="utf-8"))

    def lines() -> list[dict[str, Any]]:
        return _with_ratios([_line(each.title, size, race, flops_per_row / device, tokens_per_row) for each in runs])

    note({"flops_per_row": flops_per_row})
    race.run(size.laps, lambda: note({"contenders": lines()}))
    found = lines()
    note({"contenders": found})
    show(found)
    by_title = {line["contender"]: line for line in found}
    if "ours_padded" in by_title:
        seen = tell_whether_padding_is_seen(by_title["ours"], by_title["ours_padded"], "rows_per_second")
        note({"padding_is_seen": seen})


def _steps(size: Size) -> int:
    return (1 + size.laps) * (size.warm_up_steps + size.steps_per_lap)


def _rows(job: Job) -> list[dict[str, str]]:
    return [json.loads(line) for line in job.train_file.read_text(encoding="utf-8").splitlines()]


def job_of(plan: Plan, name: str, steps: int) -> Job:
    """The job of a part, in a folder of its own, where its cache lies too."""
    size = SIZES[plan.size]
    folder = plan.folder / name
    folder.mkdir()
    os.environ["INDICTUNE_CACHE"] = str(folder / "cache_of_ours")
    files = plan.folder / "model", plan.folder / "train.jsonl"
    return Job(*files, steps, size.steps_per_lap, folder, size.warm_up_steps)


def _steps_per_lap(title: str, size: Size) -> int:
    return size.steps_per_lap_of.get(title, size.steps_per_lap)


def _with_steps_of(title: str, job: Job, size: Size) -> Job:
    """The job of one contender."""
    steps = _steps_per_lap(title, size)
    return replace(job, steps=(1 + size.laps) * (size.warm_up_steps + steps), steps_per_lap=steps)


def _lengths(rows: Sequence[dict[str, str]]) -> np.ndarray:
    return np.array([len(row["text"].split()) + 2 for row in rows])


def _line(title: str, size: Size, race: Race, mfu_per_row: float, tokens_per_row: float) -> dict[str, Any]:
    """What is known of a contender so far.

    `seconds_of_steps_for_2m_rows` is no epoch's time, which has a start, a preparation and saves too: it is reckoned
    from the speed of the laps. `benchmarks/epoch.py` trains one.

    A run in fp32 has no `mfu`: that is a share of the device's products of bf16.

    Args:
        mfu_per_row: utilisation of the device's bf16 products at one row a second.
        tokens_per_row: of all rows, which those of the laps are like.
    """
    line: dict[str, Any] = {"contender": title}
    if title in race.errors:
        line["error"] = race.errors[title]
    laps = race.laps.get(title)
    if not laps:
        return line
    batch_size = PLAIN_BATCH_SIZE if title == "trainer_defaults" else size.global_batch_size
    rows = _steps_per_lap(title, size) * batch_size
    speeds = [rows / seconds for seconds in laps]
    speed = statistics.median(speeds)
    counted = race.counted[title]
    if title in race.seconds_to_ready:
        line["seconds_to_first_step"] = round(race.seconds_to_ready[title] + counted["first_step_s"], 1)
    if title not in IN_FP32:
        line["mfu"] = round(speed * mfu_per_row, 4)
    return line | {
        "rows_per_second": round(speed, 1),
        "slowest_and_fastest_lap": [round(min(speeds), 1), round(max(speeds), 1)],
        "laps": len(laps),
        "few_laps": len(laps) < ENOUGH_LAPS,
        "seconds_of_steps_for_2m_rows": round(ROWS_OF_THE_GOAL / speed, 1),
        "tokens_per_second": round(speed * tokens_per_row),
        "padding_fraction": round(counted["padding_fraction"], 4),
        "peak_memory_bytes": counted["peak_memory_bytes"],
        "trained_vocabulary": counted["trained_vocabulary"],
    }


def _with_ratios(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each line with how many times as fast it is as those that others are compared with."""
    for baseline in lines:
        if baseline["contender"] not in BASELINES:
            continue
        for line in lines:
            if "rows_per_second" in line and "rows_per_second" in baseline:
                ratio = line["rows_per_second"] / baseline["rows_per_second"]
                line[f"times_{baseline['contender']}"] = round(ratio, 2)
    return lines


COLUMNS = {
    "rows_per_second": ("rows/s", "{:,.0f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "padding_fraction": ("padding", "{:.1%}"),
    "peak_memory_bytes": ("peak bytes", "{:.2e}"),
    "seconds_to_first_step": ("1st step s", "{:.1f}"),
    "seconds_of_steps_for_2m_rows": ("2M rows, steps alone, s", "{:,.0f}"),
    "times_trainer_defaults": ("x defaults", "{:.2f}"),
    "times_trainer_best": ("x best", "{:.2f}"),
    "times_ours": ("x ours", "{:.2f}"),
}


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    widths = [max(12, len(title) + 2) for title, _ in COLUMNS.values()]
    titles = zip(COLUMNS.values(), widths, strict=True)
    print(f"\n{'':<27}" + "".join(f"{title:>{width}}" for (title, _), width in titles))
    for line in lines:
        cells = [form.format(line[name]) if name in line else "" for name, (_, form) in COLUMNS.items()]
        row = zip(cells, widths, strict=True)
        print(f"{line['contender']:<27}" + "".join(f"{cell:>{width}}" for cell, width in row))
        tell_few_laps(line)
        if "error" in line:
            print(f"  failed: {line['error'].splitlines()[-1]}")
    print(flush=True)
