"""Without padding each kind of classifier trains on two ranks the model that the padded one becomes on one process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from indictune.models.unpadded import CLASSIFIERS
from tests.models.tiny import CONFIGS, WORDS, words_tokenizer
from tests.ranks.conftest import JOB, starter
from tests.ranks.launching import Run
from tests.ranks.test_parity import PLAIN, SGD, differences

Start = Callable[..., Run]

# AdamW would make steps of the rounding in gradients that are zero: those of the keys' biases.
STEPS = (*SGD, "--max_steps", "3", "--active_vocabulary", "off")
MODELS = (*CLASSIFIERS, "modernbert-mean")
CASES = list(product(MODELS, ("ddp", "fsdp2", "tp", "zero2_tp", "zero3")))


def write_rows(path: Path, count: int) -> Path:
    """Rows of 1 to 40 words: ModernBERT's window is 16 tokens here."""
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 40))), "label": f"{n % 3}"} for n in range(count)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run_model(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Train a kind of model under a strategy with some flags: 53 rows make global batches of 24, 24 and 5."""
    folder = tmp_path_factory.mktemp("unpadded")
    files = {
        "train_file": write_rows(folder / "train.jsonl", 53),
        "validation_file": write_rows(folder / "val.jsonl", 11),
    }
    recipe = folder / "job.yaml"
    recipe.write_text(JOB + "".join(f"{key}: {json.dumps(str(path))}\n" for key, path in files.items()))
    start = starter(recipe, tmp_path_factory)

    def run(model_type: str, strategy: str, ranks: int, *flags: str) -> Run:
        model = folder / model_type
        if not model.exists():
            write_model(model, model_type)
        return start(strategy, ranks, "--model_name_or_path", str(model), *STEPS, *flags)

    return run


def write_model(folder: Path, model_type: str) -> None:
    """From random weights, without a head, and its tokenizer."""
    tokenizer = words_tokenizer(None if model_type == "llama" else "[PAD]")
    config = CONFIGS[model_type.removesuffix("-mean")]()
    if model_type.endswith("-mean"):  # as published
        config.classifier_pooling = "mean"
    config.pad_token_id = tokenizer.pad_token_id
    config.initializer_range = 0.1  # enough for attention to matter
    torch.manual_seed(1)
    model: Any = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "strategy"), CASES)
def test_two_ranks_train_the_model_of_one_process(run_model: Start, model_type: str, strategy: str) -> None:
    """With two accumulation steps on each rank."""
    one, two = run_model(model_type, "single", 1, *PLAIN), run_model(model_type, strategy, 2, "--padding_free", "on")
    assert (one.metrics["train"]["padding_fraction"] > 0.2, two.metrics["train"]["padding_fraction"]) == (True, 0)
    assert differences(one, two) == []
