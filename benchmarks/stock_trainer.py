"""What a careful user writes with transformers' Trainer alone: it resumes from `get_last_checkpoint`, and saves on
SIGTERM (`enable_jit_checkpoint`). For `benchmarks.faults`.

    python benchmarks/stock_trainer.py OUTPUT_DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from indictune.models import builtin

SAMPLES = Path(__file__).parents[1] / "indictune/data/samples/train.jsonl"
ROWS = 32


def main(output_dir: str) -> None:
    """Train for 8 steps in 2 epochs, saving each; then save the model."""
    set_seed(42)
    folder = builtin.resolve("builtin:tiny-indic-bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with SAMPLES.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(ROWS), lines, strict=False)]
    labels = sorted({row["label"] for row in rows})
    data = [
        {**tokenizer(row["text"], truncation=True, max_length=32), "label": labels.index(row["label"])} for row in rows
    ]
    args = TrainingArguments(
        output_dir=output_dir,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        learning_rate=1e-4,
        save_steps=1,
        logging_steps=1,
        enable_jit_checkpoint=True,
        use_cpu=True,
        report_to="none",
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(labels))
    trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer)
    find: Any = get_last_checkpoint
    last = find(output_dir) if Path(output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    if trainer.state.global_step < trainer.state.max_steps:
        return
    if not all(torch.isfinite(each).all() for each in model.parameters()):
        print("the saved weights are not finite")
    trainer.save_model(output_dir)


if __name__ == "__main__":
    main(sys.argv[1])
