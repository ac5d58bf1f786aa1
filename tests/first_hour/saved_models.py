"""Small models with random weights, saved like those of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from indictune.config.arguments import ModelArguments
from indictune.files import write_yaml
from indictune.models import builtin
from indictune.models.adapters import save_adapter_extras
from indictune.models.builtin import sample_rows
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_classifier

LABELS = ["anger", "joy", "neutral"]
MAX_LENGTH = 16


def saved_classifier(folder: Path, problem_type: Any = None, **settings: Any) -> Path:
    """Save the built-in BERT with a random head, whose scores differ much from text to text."""
    args = ModelArguments(**settings)
    tokenizer = load_tokenizer(args)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = load_classifier(args, ["score"] if problem_type == "regression" else LABELS, tokenizer, problem_type)
        for name, parameter in model.named_parameters():
            if "classifier" in name or "pooler" in name or "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    _spread(model, tokenizer)
    model.save_pretrained(str(folder))
    save_adapter_extras(model, folder)
    tokenizer.save_pretrained(folder)
    write_yaml(folder / "recipe.yaml", {"max_length": MAX_LENGTH, "text_column": "tweet"})
    return folder


def saved_llama(folder: Path) -> Path:
    """Save the built-in LLaMA, with weights so large that it says different things, and its template."""
    base = builtin.resolve("builtin:tiny-indic-llama")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def _spread(model: Any, tokenizer: Any) -> None:
    """Centre and stretch the logits: those of an untrained BERT hardly depend on the text."""
    batch = tokenizer([row["text"] for row in sample_rows("test.jsonl")[:40]], padding=True, return_tensors="pt")
    head = {name: parameter for name, parameter in model.named_parameters() if "classifier" in name}
    weight, bias = (
        next(each for name, each in head.items() if name.endswith(kind) and each.requires_grad)
        for kind in ("weight", "bias")
    )
    with torch.no_grad():
        logits = model.eval()(**batch).logits
        scale = 2 / logits.std(0)
        bias.copy_((bias - logits.mean(0)) * scale)
        weight.mul_(scale[:, None])
