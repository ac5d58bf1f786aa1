"""Small classifiers with random heads, saved like those of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from indictune.config.arguments import ModelArguments
from indictune.files import write_yaml
from indictune.models.adapters import save_adapter_extras
from indictune.models.classifier import load_classifier
from indictune.models.load import load_tokenizer

LABELS = ["anger", "joy", "neutral"]
MAX_LENGTH = 16


def saved_classifier(folder: Path, problem_type: Any = None, **settings: Any) -> Path:
    """Save the built-in BERT with a random head, whose scores differ from text to text."""
    args = ModelArguments(**settings)
    tokenizer = load_tokenizer(args)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = load_classifier(args, ["score"] if problem_type == "regression" else LABELS, tokenizer, problem_type)
        for name, parameter in model.named_parameters():
            if "classifier" in name or "pooler" in name or "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(str(folder))
    save_adapter_extras(model, folder)
    tokenizer.save_pretrained(folder)
    write_yaml(folder / "recipe.yaml", {"max_length": MAX_LENGTH, "text_column": "tweet"})
    return folder
