"""The Trainer of classifiers: by which metrics of a language checkpoints can be compared, and how rows are padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import XLNetConfig, XLNetForSequenceClassification

from indictune.config.arguments import SentimentTrainingArguments
from indictune.tasks.classification import SingleLabel
from indictune.tasks.protocol import Origins
from indictune.training.exact_trainer import IndicTrainer
from indictune.training.task_trainer import RunContext
from tests.models.test_unpadded import classifier
from tests.models.tiny import words_tokenizer


def evaluating(folder: Path, **given: Any) -> SentimentTrainingArguments:
    settings = {"use_cpu": True, "eval_strategy": "no", "load_best_model_at_end": False, "disable_tqdm": True, **given}
    return SentimentTrainingArguments(str(folder), **settings)


@pytest.mark.parametrize("side", ["left", "right"])
def test_whatever_side_a_tokenizer_pads_on_a_row_is_scored_as_alone(tmp_path: Path, side: str) -> None:
    """An encoder reads the first place of a row, and counts positions from it."""
    tokenizer = words_tokenizer()
    tokenizer.padding_side = side
    model = classifier("bert")
    lengths = (9, 3, 5, 7)
    ids = [torch.randint(5, 60, (length,)).tolist() for length in lengths]
    rows = {"input_ids": ids, "labels": [0, 1, 2, 0], "length": list(lengths), "language": ["hi"] * 4}
    losses = []
    for at_once in (1, 4):
        args = evaluating(tmp_path, per_device_eval_batch_size=at_once)
        trainer = IndicTrainer(
            model, args, None, Dataset.from_dict(rows), tokenizer, SingleLabel(model.config, tokenizer)
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert tokenizer.padding_side == "right"  # and so in the saved model


def test_a_model_that_reads_the_last_place_is_padded_before_it(tmp_path: Path) -> None:
    tokenizer = words_tokenizer()
    tokenizer.padding_side = "left"
    model = XLNetForSequenceClassification(XLNetConfig(vocab_size=64, d_model=8, n_layer=1, n_head=2, d_inner=8))
    trainer = IndicTrainer(model, evaluating(tmp_path), None, None, tokenizer, SingleLabel(model.config, tokenizer))
    rows = [{"input_ids": np.arange(3, 3 + length), "labels": 0, "row": 0} for length in (3, 1)]
    assert trainer.objective.collator(evaluating=True)(rows)["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.more
def test_checkpoints_are_compared_by_the_rows_of_a_script_alone(tmp_path: Path) -> None:
    """All romanised rows have the label that the model learns, and no other row has it."""
    tokenizer, model = words_tokenizer(), classifier("bert")
    ids = [[number % 50 + 5, 7, 9] for number in range(12)]
    romanised = [number % 3 == 0 for number in range(12)]
    rows = {"input_ids": ids, "labels": [int(each) for each in romanised], "length": [3] * 12, "language": ["hi"] * 12}
    train = Dataset.from_dict({**rows, "labels": [1] * 12})
    given = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 6,
        "metric_for_best_model": "macro_recall_romanised",
    }
    args = evaluating(tmp_path, **given, save_strategy="no", learning_rate=0.05, global_batch_size=12, bf16=False)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = 12, 1
    objective = SingleLabel(model.config, tokenizer)
    origins = Origins(str, ["accha" if each else "अच्छा" for each in romanised])
    context = RunContext(validation_origins=origins)
    trainer = IndicTrainer(
        model, args, train, Dataset.from_dict(rows), tokenizer, objective, padded=True, context=context
    )
    trainer.train()
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated[-1]["eval_macro_recall_romanised"] == 1
    assert trainer.state.best_metric == 1
    assert evaluated[-1]["eval_accuracy"] == pytest.approx(4 / 12)
