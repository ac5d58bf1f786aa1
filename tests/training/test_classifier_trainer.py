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
from indictune.tasks.text_objectives import SingleLabel
from indictune.training.classifier_trainer import IndicTrainer
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
