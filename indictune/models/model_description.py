"""Save what a model's folder needs besides weights: configuration, tokenizer and generation settings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_description(
    model: nn.Module, architecture: str, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Save the description into a sharded checkpoint, for which the Trainer saves none. Call it on one process.

    Args:
        model: in training. `save_adapter_extras` saves the rest of an adapter.
        architecture: name of the model's class.
        tokenizer: of the model.
        folder: of the checkpoint.
    """
    if isinstance(model, PeftModel):
        adapter = copy.copy(model.peft_config[model.active_adapter])
        adapter.inference_mode = True
        adapter.save_pretrained(str(folder))
    else:
        plain = cast(PreTrainedModel, model)
        plain.config.architectures = [architecture]
        plain.config.save_pretrained(folder)
        if plain.can_generate():
            plain.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
