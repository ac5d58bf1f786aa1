"""Adapters on a LLaMA of 8B parameters on a GPU: ours beside plain TRL at its defaults.

Random weights are built from the shapes, so that nothing is downloaded. Rows are as long as alpaca's, in digits from 1
to 9, each of which is a token. Counted are the tokens of rows, never padding. `ours_joined` is like for like: a step
has TRL's very rows, which the result shows by the tokens of each step. `ours_padded` is that with the padding put
back; where it is not slower, a warning says so. A step of `ours_packed` has more tokens, and gains by that too. Peak
memory is that of torch's allocator, without the states that QLoRA's own optimizer pages (bitsandbytes 0.50 has them
from CUDA itself; `ours_fused` has none): 44 MB of 8B.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

from benchmarks.contenders import Contender, Job, Turns, count_places, order_of, run_script, write_to_log
from benchmarks.flops import adapter_flops
from benchmarks.parts import Note, Plan
from benchmarks.row_lengths import ANSWERS, PROMPTS, draw_lengths
from benchmarks.turns import ENOUGH_LAPS, Race, tell_few_laps, tell_whether_padding_is_seen
from indictune.data.batching import TrainingBatches
from indictune.models import builtin

TRL_BATCH_SIZE = 8  # its default
# Packs in a batch of ours: about as many places as TRL's padded rows have.
PACKS = 4
SEED = 42  # of the shuffle, which is ours; TRL gets its rows in that order
NOT_JOINED = "_padded"  # how the title of the contender ends whose rows are not joined
LORA = {"lora_r": 16, "lora_alpha": 32}


@dataclass(frozen=True)
class Size:
    """How large the comparison is.

    Attributes:
        model: of the LlamaConfig.
        max_length: of a row or a pack, in tokens.
        steps_per_lap: timed.
        warm_up_steps: before each lap.
        laps: at most.
    """

    model: dict[str, Any]
    max_length: int
    steps_per_lap: int
    warm_up_steps: int
    laps: int

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return (1 + self.laps) * (self.warm_up_steps + self.steps_per_lap)


SIZES = {
    "full": Size(
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        max_length=1024,  # TRL's default
        steps_per_lap=2,
        warm_up_steps=1,
        laps=6,
    ),
    "tiny": Size(
        {
            "vocab_size": 4096,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
        },
        max_length=256,
        steps_per_lap=1,
        warm_up_steps=0,
        laps=1,
    ),
}


def compare(method: str, plan: Plan, note: Note) -> None:
    """A part: one method."""
    size = SIZES[plan.size]
    since = time.time()
    model, rows, lengths = write_inputs(plan)
    note({"seconds_to_write_model": round(time.time() - since, 1)})
    flops_per_token = adapter_flops(LlamaConfig.from_pretrained(model), lengths) / float(lengths.sum())
    device = json.loads((plan.folder / "flops.json").read_text(encoding="utf-8"))
    note({"flops_per_token": flops_per_token, "rows": len(lengths), "tokens_per_row": round(float(lengths.mean()), 1)})
    folder = plan.folder / method
    folder.mkdir()
    job = Job(model, rows, size.steps, size.steps_per_lap, folder, size.warm_up_steps)
    runs = contenders(method, size, lengths)
    run_race(runs, plan, job, flops_per_token / device, note)


def write_inputs(plan: Plan) -> tuple[Path, Path, np.ndarray]:
    """The model, unless an earlier part has written it to its end, and the rows: both paths, and each row's tokens."""
    size = SIZES[plan.size]
    model, rows = plan.folder / "llama", plan.folder / "chats.jsonl"
    unfinished = model.with_name("unfinished_llama")  # an earlier part may have been stopped in it
    os.environ["INDICTUNE_CACHE"] = str(plan.folder / "cache_of_llama")
    if not model.exists():
        write_model(unfinished, size.model)
        unfinished.rename(model)
    return model, rows, write_rows(rows, 3 * size.steps * TRL_BATCH_SIZE, size.max_length, plan.full_length)


def run_race(runs: Sequence[Contender], plan: Plan, job: Job, mfu_per_token: float, note: Note) -> None:
    """Run the contenders by turns, and tell the table after each round and at the end.

    Args:
        runs: TRL last.
        plan: of the part. Its first two thirds are for starting.
        job: of all.
        mfu_per_token: utilisation of the device's bf16 products at one token a second.
        note: gets the table.
    """
    race = Race(compete, plan.start, plan.deadline)
    race.enter_all([(contender, job) for contender in (runs[-1], *runs[:-1])], at_once=len(runs))  # TRL first
    race.run(SIZES[plan.size].laps, lambda: note({"contenders": lines(runs, job, race, mfu_per_token)}))
    found = lines(runs, job, race, mfu_per_token)
    note({"contenders": found})
    show(found)
    of_each = {line["contender"].partition("_")[2]: line for line in found}  # without the method
    seen = tell_whether_padding_is_seen(of_each["ours_joined"], of_each["ours_padded"], "tokens_per_second")
    note({"padding_is_seen": seen})


def write_model(folder: Path, shape: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """The model, and the package's own tokenizer."""
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
        torch.cuda.empty_cache()  # the GPU is the contenders'


def write_rows(path: Path, count: int, max_length: int, full_length: bool) -> np.ndarray:
    """Chats of digits; returns the tokens of each row, without those of the template.

    Args:
        path: jsonl.
        count: of rows.
        max_length: to which rows are cut.
        full_length: answers have so many digits.
    """
    generator = np.random.default_rng(0)
    prompts = draw_lengths(PROMPTS, count, generator)
    answers = np.full(count, max_length) if full_length else draw_lengths(ANSWERS, count, generator)
    with path.open("w", encoding="utf-8") as file:
        for prompt, answer in zip(prompts, answers, strict=True):
            digits = [" ".join(map(str, generator.integers(1, 10, length))) for length in (prompt, answer)]
            turns = zip(("user", "assistant"), digits, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    lengths: np.ndarray = (prompts + answers).clip(max=max_length)
    return lengths


def contenders(method: str, size: Size, lengths: np.ndarray) -> list[Contender]:
    """Who runs: packed, the same rows as TRL's without padding, and with it, which must show, and TRL.

    QLoRA's own optimizer waits for the GPU at each weight; TRL's default is a contender of ours, too.

    Args:
        method: of the adapter.
        size: of the comparison.
        lengths: of all rows, which are dealt as ours deals them.
    """
    batches = TrainingBatches(torch.from_numpy(lengths), TRL_BATCH_SIZE, 1, 0, 1, SEED, padded=False)
    common = {"method": method, "max_length": size.max_length}
    adapter = {**common, **LORA, "lora_dropout": 0.0}  # peft's default
    packed = {**adapter, "packing": "true", "global_batch_size": PACKS, "per_device_train_batch_size": PACKS}
    rows = {"global_batch_size": TRL_BATCH_SIZE, "per_device_train_batch_size": TRL_BATCH_SIZE, "data_seed": SEED}
    joined = {**adapter, **rows}
    fused = [Contender(f"{method}_ours_fused", settings={**joined, "optim": "adamw_torch_fused"})]
    return [
        Contender(f"{method}_ours_packed", settings=packed),
        Contender(f"{method}_ours_joined", settings=joined),
        *(fused if method == "qlora" else []),
        Contender(f"{method}_ours{NOT_JOINED}", settings=joined),
        Contender(f"{method}_trl", "longest", common, tuple(order_of(batches, size.steps))),
    ]


def compete(contender: Contender, job: Job, connection: Connection, turns: type[Turns] = Turns) -> None:
    """The whole life of a child process, which takes its turns as `turns` has them."""
    write_to_log(contender, job)
    if contender.padding is None:
        train_by_indictune(contender, job, connection, turns)
    else:
        train_by_trl(contender, job, connection, turns)


def train_by_indictune(contender: Contender, job: Job, connection: Connection, turns: type[Turns]) -> None:
    """scripts/train_llama.py, with one callback more."""

    def callback(trainer: Any, throughput: Any) -> Turns:
        places = count_places(trainer)

        def counted() -> dict[str, Any]:
            batches = trainer.batches
            steps = (divmod(step, batches.steps_per_epoch) for step in range(trainer.state.global_step))
            tokens = [batches.counts(epoch, step)[1] for epoch, step in steps]
            found = {"padding_fraction": 1 - throughput.tokens / sum(places), "tokens_of_steps": tokens}
            return {**found, "order": order_of(batches, trainer.state.global_step)}

        return turns(connection, job, counted)

    run_llama(contender, job, callback)


def run_llama(contender: Contender, job: Job, callback: Callable[[Any, Any], TrainerCallback]) -> None:
    """scripts/train_llama.py with a contender's settings; `callback` as of `run_script`."""
    from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments
    from scripts import train_llama

    if contender.title.endswith(NOT_JOINED):  # no flag of a LLaMA's puts the padding back
        setattr(train_llama, "pads_causal", lambda *_: True)  # noqa: B010
    settings = {
        "model_name_or_path": job.model,
        "train_file": job.train_file,
        "output_dir": job.folder / contender.title,
        "max_steps": job.steps,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": "false",
        "disable_tqdm": "true",
        **contender.settings,
    }
    run_script(train_llama, (LlamaModelArguments, ChatDataArguments, LlamaTrainingArguments), settings, callback)


def train_by_trl(contender: Contender, job: Job, connection: Connection, turns: type[Turns]) -> None:
    """TRL's SFTTrainer as `trl_trainer` makes it, with its tokens counted."""
    trainer = trl_trainer(contender, job)
    prepared: Any = trainer.train_dataset
    lengths = [len(ids) for ids in prepared["input_ids"]]
    pad: Any = trainer.data_collator
    counts = {"tokens": 0, "places": 0}

    def pad_and_count(rows: list[dict[str, Any]]) -> Any:
        batch = pad(rows)
        counts["tokens"] += int(batch["attention_mask"].sum())
        counts["places"] += batch["attention_mask"].numel()
        return batch

    def counted() -> dict[str, Any]:
        steps = range(0, trainer.state.global_step * TRL_BATCH_SIZE, TRL_BATCH_SIZE)
        tokens = [sum(lengths[first : first + TRL_BATCH_SIZE]) for first in steps]
        return {"padding_fraction": 1 - counts["tokens"] / counts["places"], "tokens_of_steps": tokens}

    trainer.data_collator = pad_and_count
    trainer.add_callback(turns(connection, job, counted))
    trainer.train()


def trl_trainer(contender: Contender, job: Job) -> Any:
    """TRL's SFTTrainer at its defaults, but for the loss, which counts the answers alone, as ours does.

    Args:
        contender: its settings are a `method`, a `dtype` of the weights (bf16), and TRL's own; its order that of the
            rows.
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
        train_sampling_strategy="sequential",  # in the order that it is given
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


def lines(runs: Sequence[Contender], job: Job, race: Race, mfu_per_token: float) -> list[dict[str, Any]]:
    """The table so far, TRL last."""
    found = [_line(contender.title, job, race, mfu_per_token) for contender in runs]
    trl = found[-1]
    for line in found:
        if "tokens_per_second" in line and "tokens_per_second" in trl:
            line["times_trl"] = round(line["tokens_per_second"] / trl["tokens_per_second"], 2)
            line["memory_of_trl"] = round(line["peak_memory_bytes"] / trl["peak_memory_bytes"], 2)
    return found


def _line(title: str, job: Job, race: Race, mfu_per_token: float) -> dict[str, Any]:
    line: dict[str, Any] = {"contender": title}
    if title in race.errors:
        line["error"] = race.errors[title]
    laps = race.laps.get(title)
    if not laps:
        return line
    counted = race.counted[title]
    steps_of_lap = job.warm_up_steps + job.steps_per_lap
    tokens = counted["tokens_of_steps"]
    timed = [
        sum(tokens[lap * steps_of_lap + job.warm_up_steps : (lap + 1) * steps_of_lap])
        for lap in range(1, 1 + len(laps))
    ]
    speeds = [count / seconds for count, seconds in zip(timed, laps, strict=True)]
    return line | {
        "tokens_per_second": round(statistics.median(speeds), 1),
        "slowest_and_fastest_lap": [round(min(speeds), 1), round(max(speeds), 1)],
        "laps": len(laps),
        "few_laps": len(laps) < ENOUGH_LAPS,
        "mfu": round(statistics.median(speeds) * mfu_per_token, 4),
        "tokens_per_step": round(statistics.mean(tokens), 1),
        "tokens_of_steps": tokens,
        "padding_fraction": round(counted["padding_fraction"], 4),
        "peak_memory_bytes": counted["peak_memory_bytes"],
    }


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"\n{'':<20}{'tokens/s':>10}{'MFU':>8}{'padding':>9}{'peak bytes':>12}{'x TRL':>8}{'memory':>8}")
    for line in lines:
        print(f"{line['contender']:<20}", end="")
        if "tokens_per_second" in line:
            print(
                f"{line['tokens_per_second']:>10,.0f}{line['mfu']:>8.1%}{line['padding_fraction']:>9.1%}"
                f"{line['peak_memory_bytes']:>12.2e}{line.get('times_trl', 0):>8.2f}"
                f"{line.get('memory_of_trl', 0):>8.2f}",
                end="",
            )
        print("  failed: " + line["error"].splitlines()[-1] if "error" in line else "")
        tell_few_laps(line)
    print(flush=True)
