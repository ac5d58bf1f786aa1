"""What a whole checkpoint costs: the Trainer's own save next to ours, which syncs and hashes the files.

    OMP_NUM_THREADS=1 python -m benchmarks.checkpoints
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 \\
        -m benchmarks.checkpoints

The model is a BERT of about 100 MB with AdamW's states, on one process or sharded over several. The saves take turns
after a sync of the disk; the table has medians of rank 0. "Trainer" is its own `_save_checkpoint`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer
from transformers.utils.logging import disable_progress_bar

from benchmarks.environment import environment, write_results
from indictune.checkpoint import store
from indictune.config.arguments import ModelArguments, SentimentTrainingArguments
from indictune.console_text import table
from indictune.distributed import collectives, process_group
from indictune.distributed.launch import read_launch, world_size_of
from indictune.models.load import load_tokenizer
from indictune.tasks.classification import SingleLabel
from indictune.training.exact_trainer import IndicTrainer
from indictune.training.task_trainer import RunContext

RANKS = world_size_of(os.environ)
Seconds = tuple[float, float]  # by the clock, and of this process's cores, which other programs hardly change


def trained(folder: Path, width: int) -> IndicTrainer:
    """A trainer after one step, so that the optimizer has states."""
    config = BertConfig(
        vocab_size=30_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
    )
    launch = read_launch(os.environ)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7, 8]] * 8, "labels": [0, 1] * 4, "length": [4] * 8})
    args = SentimentTrainingArguments(
        output_dir=str(folder),
        **process_group.start_on_gloo(launch, 600),
        bf16=False,
        max_steps=1,
        global_batch_size=8,
        per_device_train_batch_size=8 // launch.world_size,
        gradient_accumulation_steps=1,
        eval_strategy="no",
        save_strategy="no",
        load_best_model_at_end=False,
        disable_tqdm=True,
    )
    tokenizer = load_tokenizer(ModelArguments("builtin:tiny-indic-bert"))
    model = BertForSequenceClassification(config)
    trainer = IndicTrainer(
        model, args, rows, None, tokenizer, SingleLabel(config, tokenizer), context=RunContext(launch)
    )
    trainer.train()
    return trainer


def seconds_of(act: Callable[[], None]) -> Seconds:
    """Seconds of an act that starts with an idle disk."""
    os.sync()
    collectives.barrier()
    since, cores_since = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - since, time.process_time() - cores_since


def measure(trainer: IndicTrainer, laps: int) -> dict[str, list[float]]:
    """Median seconds by the clock and of cores, of each save."""
    folder = store.path_of(Path(str(trainer.args.output_dir)), 1)
    model = trainer.model_wrapped
    saves: dict[str, Callable[[], None]] = {
        "Trainer": lambda: Trainer._save_checkpoint(trainer, model, None),
        "ours": lambda: trainer._save_checkpoint(model, None),
    }
    seconds: dict[str, list[Seconds]] = {name: [] for name in saves}
    for _ in range(laps):
        for name, save in saves.items():
            if trainer.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            seconds[name].append(seconds_of(save))
    return {
        name: [round(statistics.median(kind), 3) for kind in zip(*each, strict=True)] for name, each in seconds.items()
    }


def main() -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    about = environment()
    torch.manual_seed(0)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as own:
        # All ranks share a folder, which the port names.
        folder = Path(tempfile.gettempdir(), f"checkpoints-{os.environ['MASTER_PORT']}") if RANKS > 1 else Path(own)
        trainer = trained(folder, options.width)
        medians = measure(trainer, options.laps)
        size_bytes = sum(path.stat().st_size for path in Path(folder, "checkpoint-1").rglob("*"))
        collectives.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    if not trainer.args.should_save:
        return
    ratios = [round(ours / stock, 2) for ours, stock in zip(medians["ours"], medians["Trainer"], strict=True)]
    print(table(["what", "seconds", "of cores"], [[name, *map(str, pair)] for name, pair in medians.items()]))
    print(f"{size_bytes / 1e6:.0f} MB; ours takes {ratios[0]} times the Trainer's seconds, {ratios[1]} of its cores'")
    results = {"environment": about, "laps": options.laps, "checkpoint_bytes": size_bytes}
    results |= {"seconds_and_seconds_of_cores": medians, "ours_to_trainer": ratios}
    print(f"written to {write_results('checkpoints' if RANKS == 1 else f'checkpoints-fsdp2-{RANKS}', results)}")


if __name__ == "__main__":
    main()
