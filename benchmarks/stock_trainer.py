"""What a careful user writes with transformers' Trainer alone: it resumes from `get_last_checkpoint`, and saves on
SIGTERM (`enable_jit_checkpoint`). For `benchmarks.faults`.

    python benchmarks/stock_trainer.py --train_file F --validation_file F --output_dir D [--any_training_argument V]
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
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
    """What the Trainer's arguments do not say."""

    train_file: str = field(metadata={"help": "json lines of texts and labels"})
    validation_file: str = field(metadata={"help": "likewise"})
    dropout: float = field(default=0.1, metadata={"help": "all of the model's"})


def main() -> None:
    """Train, saving on the way; then save the model."""
    parser: Any = HfArgumentParser((Job, TrainingArguments))  # type: ignore[arg-type]
    job, args = parser.parse_args_into_dataclasses()
    set_seed(42)
    folder = builtin.resolve("builtin:tiny-indic-bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = [Path(name).read_text(encoding="utf-8").splitlines() for name in (job.train_file, job.validation_file)]
    rows = [[json.loads(line) for line in lines] for lines in files]
    labels = sorted({row["label"] for row in rows[0]})
    train, held_out = (
        [
            {**tokenizer(row["text"], truncation=True, max_length=32), "label": labels.index(row["label"])}
            for row in each
        ]
        for each in rows
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        folder,
        num_labels=len(labels),
        hidden_dropout_prob=job.dropout,
        attention_probs_dropout_prob=job.dropout,
    )
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer)
    find: Any = get_last_checkpoint
    last = find(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.state.global_step < trainer.state.max_steps:
        return
    if not all(torch.isfinite(each).all() for each in model.parameters()):
        print("the saved weights are not finite")
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()
