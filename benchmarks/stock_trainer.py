"""A careful user's script on transformers' Trainer: it resumes from the last checkpoint and saves on SIGTERM.

`benchmarks.faults` compares with it.

    python benchmarks/stock_trainer.py --train_file F --validation_file F --output_dir D [--any_training_argument V]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from indictune.models import builtin


@dataclass
class Job:
    """Arguments beyond the Trainer's."""

    train_file: str = field(metadata={"help": "json lines of texts and labels"})
    validation_file: str = field(metadata={"help": "json lines of texts and labels"})
    dropout: float = field(default=0.1, metadata={"help": "all dropout of the model"})
    keep_tokens: bool = field(default=False, metadata={"help": "keep tokens on disk for the next start"})


def read(name: str) -> dict[str, list[Any]]:
    """The columns `text` and `label` of a file of JSON lines."""
    rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
    return {column: [row[column] for row in rows] for column in ("text", "label")}


def kept_tokens(name: str, encoded: Callable[[dict[str, list[str]]], dict[str, list[Any]]]) -> Dataset:
    """The tokenised rows of a file, tokenised by the first start."""
    kept = Path(f"{name}-tokens")
    if not kept.exists():
        texts = Dataset.from_json(name, cache_dir=f"{name}-cache")
        texts.map(encoded, batched=True, remove_columns=["text"]).save_to_disk(kept)
    return Dataset.load_from_disk(str(kept))


def main() -> None:
    """Train, resume, save checkpoints and the model."""
    parser: Any = HfArgumentParser((Job, TrainingArguments))  # type: ignore[arg-type]
    job, args = parser.parse_args_into_dataclasses()
    set_seed(42)
    with args.main_process_first():  # the first process builds it
        folder = builtin.resolve("builtin:tiny-indic-bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = sorted(set(read(job.validation_file)["label"]))

    def encoded(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        ids = tokenizer(rows["text"], truncation=True, max_length=32)
        return {**ids, "label": [each if isinstance(each, int) else labels.index(each) for each in rows["label"]]}

    held_out = Dataset.from_dict(encoded(read(job.validation_file)))
    if job.keep_tokens:
        train = kept_tokens(job.train_file, encoded)
    else:
        train = Dataset.from_dict(encoded(read(job.train_file)))
    model = AutoModelForSequenceClassification.from_pretrained(
        folder,
        num_labels=len(labels),
        hidden_dropout_prob=job.dropout,
        attention_probs_dropout_prob=job.dropout,
    )
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer)
    find: Any = get_last_checkpoint
    last = find(args.output_dir) if Path(args.output_dir).is_dir() else None
    if last is not None and args.process_index == 0:
        print(f"Resuming from {last}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    if trainer.state.global_step == trainer.state.max_steps:
        trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
