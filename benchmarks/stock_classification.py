"""Fine-tune a text classifier as transformers' `run_classification.py` does by default.

Its version in transformers 4.48 cannot run with 5.23, so this one does what it does: rows are padded to 128 tokens,
8 rows a batch, learning rate 5e-5 without warm-up, float32, and the model of the last step is scored.

    python benchmarks/stock_classification.py --model_name_or_path M --train_file T.jsonl --test_file E.jsonl \
        --output_dir D [--any_training_argument V]
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

MAX_LENGTH = 128


@dataclass
class Job:
    """Arguments beyond the Trainer's."""

    model_name_or_path: str = field(metadata={"help": "folder of the model"})
    train_file: str = field(metadata={"help": "json lines of texts and labels"})
    test_file: str = field(metadata={"help": "json lines of texts and labels"})


def main() -> None:
    """Train, predict the test rows, and write their labels and the seconds of the training."""
    parser: Any = HfArgumentParser((Job, TrainingArguments))  # type: ignore[arg-type]
    job, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(job.model_name_or_path)
    rows = {
        name: [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        for name, file in (("train", job.train_file), ("test", job.test_file))
    }
    labels = sorted({row["label"] for row in rows["train"]})

    def encoded(some: list[dict[str, Any]]) -> Dataset:
        ids = tokenizer([row["text"] for row in some], padding="max_length", truncation=True, max_length=MAX_LENGTH)
        return Dataset.from_dict({**ids, "label": [labels.index(row["label"]) for row in some]})

    model: Any = AutoModelForSequenceClassification.from_pretrained(job.model_name_or_path, num_labels=len(labels))
    train = encoded(rows["train"])
    trainer = Trainer(model, args, train_dataset=train, data_collator=default_data_collator)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    logits: Any = trainer.predict(encoded(rows["test"])).predictions
    predicted = [labels[number] for number in np.argmax(logits, axis=1)]
    found = {"train_seconds": seconds, "predicted": predicted}
    Path(args.output_dir, "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
