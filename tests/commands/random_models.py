"""Classifiers with random weights, whose labels differ from text to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.plan import unresolved
from indictune.data.text.pairs import read_pairs
from indictune.files import write_yaml
from indictune.models.load import load_tokenizer
from indictune.models.serving_model import serve_as_trained
from indictune.models.task_models import note_reading
from tests.models.tiny import CONFIGS

LABELS = ["anger", "joy", "neutral"]
READING = {"text_column": "premise", "text_pair_column": "hypothesis"}


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


def of_pairs(folder: Path) -> Path:
    """Make a saved model one of pairs, as a run leaves it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    read_pairs(tokenizer, config)
    note_reading(config, unresolved(DataArguments, READING))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    serve_as_trained(folder, tokenizer, config, 16, pairs=True)
    write_yaml(folder / "recipe.yaml", {"max_length": 16, **READING})
    return folder
