"""A bare `Trainer` on prepared rows, with whose start `benchmarks/startup.py` compares that of a run.

    python -m benchmarks.bare_trainer MODEL ROWS.csv FOLDER

The first call tokenises the rows with plain `datasets`, and saves them in FOLDER. A later one loads them, trains one
step, and prints the seconds from the start of its process to the end of that step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
from datasets import Dataset, load_from_disk
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

MAX_LENGTH = 128
BATCH_SIZE = 8
FIRST_STEP = "seconds to the first step: "


class FirstStep(TrainerCallback):
    """Prints the age of the process after the first step."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        print(f"\n{FIRST_STEP}{time.time() - psutil.Process().create_time()}", flush=True)


def prepare(tokenizer: Any, file: str, folder: str) -> None:
    """Save the token ids and class ids of a csv file."""
    rows = Dataset.from_csv(file)
    labels = sorted(set(rows["label"]))

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids: dict[str, Any] = dict(tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH))
        return {**ids, "labels": [labels.index(label) for label in batch["label"]]}

    rows.map(encode, batched=True, remove_columns=rows.column_names).save_to_disk(folder)


def main() -> None:
    """Prepare the rows, or train one step on them."""
    named, file, folder = sys.argv[1:]
    tokenizer: Any = AutoTokenizer.from_pretrained(named)
    if not Path(folder).exists():
        prepare(tokenizer, file, folder)
        return
    rows = load_from_disk(folder)
    model = AutoModelForSequenceClassification.from_pretrained(named, num_labels=3)
    args = TrainingArguments(
        output_dir=f"{folder}-out",
        max_steps=1,
        per_device_train_batch_size=BATCH_SIZE,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorWithPadding(tokenizer)
    Trainer(model, args, train_dataset=rows, data_collator=collator, callbacks=[FirstStep()]).train()


if __name__ == "__main__":
    main()
