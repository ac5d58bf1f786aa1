"""Classifiers with random weights, whose labels differ from text to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from indictune.config.arguments import ModelArguments
from indictune.models.load import load_tokenizer
from tests.models.tiny import CONFIGS

LABELS = ["anger", "joy", "neutral"]


def random_classifier(folder: Path, architecture: str, of_tokens: bool = False, layers: int = 2) -> Path:
    """Save a classifier of an architecture with the tokenizer of the built-in BERT."""
    tokenizer: Any = load_tokenizer(ModelArguments())
    config = CONFIGS[architecture]()
    config.num_hidden_layers = layers
    config.vocab_size = len(tokenizer)
    config.id2label = dict(enumerate(LABELS))
    kind: Any = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = kind.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.model_max_length = 60
    if architecture == "bert":  # which has segments
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text("max_length: 60\n", encoding="utf-8")
    return folder
