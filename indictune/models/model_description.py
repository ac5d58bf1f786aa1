"""What a folder needs beside weights to be a model: configuration, tokenizer, how answers end."""

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
    """Write it into a checkpoint in shards, where the Trainer writes nothing of it. One process must call it.

    Args:
        model: in training. Of an adapter, `save_adapter_extras` writes the rest.
        architecture: the model's class.
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
