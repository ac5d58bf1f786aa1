"""Adapters on a LLaMA of 8B parameters on a GPU: ours next to plain TRL at its defaults.

The weights are random, so that nothing is downloaded. Rows are as long as alpaca's, in digits from 1 to 9, each of
which is a token. Padding tokens do not count. `ours_joined` has TRL's very rows in each step. `ours_padded` has them
with the padding put back. `ours_packed` has more tokens a step. Peak memory is that of torch's allocator, without the
states that QLoRA's optimizer pages (bitsandbytes 0.50): 44 MB of 8B.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.contenders import Contender, Job, Laps, count_positions, order_of, run_task, write_to_log
from benchmarks.row_lengths import ANSWERS, PROMPTS, draw_lengths
from benchmarks.runner import Measured, measure_each
from benchmarks.timed_parts import Note, Plan, show
from indictune.data.batching import TrainingBatches
from indictune.models import builtin

TRL_BATCH_SIZE = 8  # its default
PACKS = 4  # in a batch of ours: about as many positions as TRL's padded rows
SEED = 42  # of our shuffle; TRL gets the rows in that order
PADDED = "_padded"  # ends the title of the contender that pads
LORA = {"lora_r": 16, "lora_alpha": 32}


@dataclass(frozen=True)
class Size:
    """The size of the comparison; a lap is `steps_per_lap` steps, and the first of `1 + laps` warms up."""

    model: dict[str, Any]
    max_length: int
    steps_per_lap: int
    laps: int

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return (1 + self.laps) * self.steps_per_lap


def _shape(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    shape = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    return {**shape, "num_hidden_layers": layers, "num_attention_heads": heads}


SIZES = {
    "full": Size(_shape(128256, 4096, 14336, 32, 32), max_length=1024, steps_per_lap=2, laps=6),  # TRL's length
    "tiny": Size(_shape(4096, 64, 128, 2, 8), max_length=256, steps_per_lap=1, laps=1),
}


def compare(method: str, plan: Plan, note: Note) -> None:
    """Part: tokens a second of one method."""
    size = SIZES[plan.size]
    since = time.time()
    model, rows, lengths = write_inputs(plan)
    note({"seconds_to_write_model": round(time.time() - since, 1)})
    note({"rows": len(lengths), "tokens_per_row": round(float(lengths.mean()), 1)})
    folder = plan.folder / method
    folder.mkdir()
    job = Job(model, rows, size.steps, size.steps_per_lap, folder)
    lines: list[dict[str, Any]] = []
    for measured in measure_each(contenders(method, size, lengths), job, size.laps, plan.deadline, compete):
        lines.append(line_of(measured, job))
        note({"contenders": with_ratios(lines)})
    show(lines, COLUMNS)


def write_inputs(plan: Plan) -> tuple[Path, Path, np.ndarray]:
    """Write the model, unless an earlier part did, and the rows; return both paths and each row's tokens."""
    size = SIZES[plan.size]
    model, rows = plan.folder / "llama", plan.folder / "chats.jsonl"
    unfinished = model.with_name("unfinished_llama")  # an earlier part may have been stopped
    os.environ["INDICTUNE_CACHE"] = str(plan.folder / "cache_of_llama")
    if not model.exists():
        write_model(unfinished, size.model)
        unfinished.rename(model)
    return model, rows, write_rows(rows, 3 * size.steps * TRL_BATCH_SIZE, size.max_length)


def write_model(folder: Path, shape: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model, and the package's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(**shape, num_key_value_heads=8, max_position_embeddings=8192, dtype=dtype)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            LlamaForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(default)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # contenders need the memory


def write_rows(path: Path, count: int, max_length: int) -> np.ndarray:
    """Write chats of digits as JSON lines; return the tokens of each row, without those of the template."""
    generator = np.random.default_rng(0)
    prompts = draw_lengths(PROMPTS, count, generator)
    answers = draw_lengths(ANSWERS, count, generator)
    with path.open("w", encoding="utf-8") as file:
        for prompt, answer in zip(prompts, answers, strict=True):
            digits = [" ".join(map(str, generator.integers(1, 10, length))) for length in (prompt, answer)]
            turns = zip(("user", "assistant"), digits, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    lengths: np.ndarray = (prompts + answers).clip(max=max_length)
    return lengths


def contenders(method: str, size: Size, lengths: np.ndarray) -> list[Contender]:
    """Who runs: TRL; its rows joined, and padded, by ours; and ours packed.

    Args:
        method: of the adapter.
        size: of the comparison.
        lengths: of all rows, in tokens.
    """
    batches = TrainingBatches(torch.from_numpy(lengths), TRL_BATCH_SIZE, 1, 0, 1, SEED, padded=False)
    common = {"method": method, "max_length": size.max_length}
    adapter = {**common, **LORA, "lora_dropout": 0.0}  # peft's default
    packed = {**adapter, "packing": "true", "global_batch_size": PACKS, "per_device_train_batch_size": PACKS}
    rows = {"global_batch_size": TRL_BATCH_SIZE, "per_device_train_batch_size": TRL_BATCH_SIZE, "data_seed": SEED}
    return [
        Contender(f"{method}_trl", "longest", common, tuple(order_of(batches, size.steps))),
        Contender(f"{method}_ours_joined", settings={**adapter, **rows}),
        Contender(f"{method}_ours{PADDED}", settings={**adapter, **rows}),
        Contender(f"{method}_ours_packed", settings=packed),
    ]


def compete(contender: Contender, job: Job, connection: Connection) -> None:
    """Run a contender in a child process."""
    write_to_log(contender, job)
    if contender.padding is None:
        train_by_indictune(contender, job, connection)
    else:
        train_by_trl(contender, job, connection)


def train_by_indictune(contender: Contender, job: Job, connection: Connection) -> None:
    """Run scripts/train_llama.py with the callback `Laps`."""

    def callback(trainer: Any, throughput: Any) -> Laps:
        positions = count_positions(trainer)

        def counted() -> dict[str, Any]:
            batches = trainer.batches
            steps = (divmod(step, batches.steps_per_epoch) for step in range(trainer.state.global_step))
            tokens = [batches.counts(epoch, step)[1] for epoch, step in steps]
            found = {"padding_fraction": 1 - throughput.tokens / sum(positions), "tokens_of_steps": tokens}
            return {**found, "order": order_of(batches, trainer.state.global_step)}

        return Laps(connection, job, counted)

    run_llama(contender, job, callback)


def run_llama(contender: Contender, job: Job, callback: Callable[[Any, Any], TrainerCallback]) -> None:
    """Run scripts/train_llama.py with a contender's settings; `callback` as in `run_task`."""
    from indictune.tasks import chat

    if contender.title.endswith(PADDED):  # no flag puts the padding back
        setattr(chat, "pads_causal", lambda *_: True)  # noqa: B010
    settings = {
        "model_name_or_path": job.model,
        "train_file": job.train_file,
        "validation_split": 0,
        "output_dir": job.folder / contender.title,
        "max_steps": job.steps,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": "false",
        "disable_tqdm": "true",
        **contender.settings,
    }
    run_task(chat.Chat(), settings, callback)


def train_by_trl(contender: Contender, job: Job, connection: Connection) -> None:
    """Train with TRL, and count its tokens."""
    trainer = trl_trainer(contender, job)
    pad: Any = trainer.data_collator
    tokens, positions = [], []  # of each batch

    def pad_and_count(rows: list[dict[str, Any]]) -> Any:
        batch = pad(rows)
        tokens.append(int(batch["attention_mask"].sum()))
        positions.append(batch["attention_mask"].numel())
        return batch

    def counted() -> dict[str, Any]:
        padding = 1 - sum(tokens) / sum(positions)
        return {"padding_fraction": padding, "tokens_of_steps": tokens[: trainer.state.global_step]}

    trainer.data_collator = pad_and_count
    trainer.add_callback(Laps(connection, job, counted))
    trainer.train()


def trl_trainer(contender: Contender, job: Job) -> Any:
    """TRL's SFTTrainer at its defaults, with a loss of the answers alone, as ours.

    Args:
        contender: its settings are the `method`, the `dtype` of the weights (bf16 by default), and TRL's own.
        job: of all.
    """
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    nf4 = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    settings = {"dtype": torch.bfloat16, **contender.settings}
    method, dtype = settings.pop("method"), settings.pop("dtype")
    args = SFTConfig(
        output_dir=str(job.folder / contender.title),
        max_steps=job.steps,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",  # in the given order
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": dtype},
        **settings,
    )
    rows = load_dataset("json", data_files=str(job.train_file), split="train", cache_dir=str(job.folder / "cache"))
    adapter = LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", r=LORA["lora_r"], lora_alpha=LORA["lora_alpha"]
    )
    return SFTTrainer(
        str(job.model),
        args=args,
        train_dataset=rows.select(contender.order),
        peft_config=None if method == "full" else adapter,
        quantization_config=nf4 if method == "qlora" else None,
    )


def line_of(measured: Measured, job: Job) -> dict[str, Any]:
    """A contender's line of the table."""
    line: dict[str, Any] = {"contender": measured.title} | ({"error": measured.error} if measured.error else {})
    if not measured.laps:
        return line
    tokens = measured.counted["tokens_of_steps"]
    size = job.steps_per_lap
    of_laps = [sum(tokens[lap * size : (lap + 1) * size]) for lap in range(1, 1 + len(measured.laps))]
    speeds = [count / seconds for count, seconds in zip(of_laps, measured.laps, strict=True)]
    return line | {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "slowest_and_fastest_lap": [round(min(speeds), 1), round(max(speeds), 1)],
        "laps": len(speeds),
        "tokens_of_steps": tokens,
        "padding_fraction": round(measured.counted["padding_fraction"], 4),
        "peak_memory_bytes": measured.counted["peak_memory_bytes"],
    }


def with_ratios(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each line its speed and memory as multiples of TRL's, which comes first."""
    trl = lines[0]
    for line in lines:
        if "tokens_per_second" in line and "tokens_per_second" in trl:
            line["times_trl"] = round(line["tokens_per_second"] / trl["tokens_per_second"], 2)
            line["memory_of_trl"] = round(line["peak_memory_bytes"] / trl["peak_memory_bytes"], 2)
    return lines


COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "laps": ("laps", "{}"),
    "padding_fraction": ("padding", "{:.1%}"),
    "peak_memory_bytes": ("peak bytes", "{:.2e}"),
    "times_trl": ("x TRL", "{:.2f}"),
    "memory_of_trl": ("memory of TRL", "{:.2f}"),
    "error": ("error", "{:.60}"),
}
