"""How large a model is, counted from its configuration without its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig


@dataclass(frozen=True)
class ModelSize:
    """Numbers of a model.

    Attributes:
        embedded: parameters that are looked up, such as rows of the vocabulary.
        multiplied: all other parameters, which every token is multiplied by. A causal model's output layer is one.
        linear: of these, the parameters of linear layers within the blocks, which NF4 quantises and LoRA adapts.
        adapter: parameters of a LoRA of rank 1 on all of these layers.
        layers: blocks.
        width: numbers of a token between two blocks.
        heads: of the attention.
        vocabulary: tokens.
    """

    embedded: int
    multiplied: int
    linear: int
    adapter: int
    layers: int
    width: int
    heads: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embedded + self.multiplied


def size_of(config: PreTrainedConfig, is_causal: bool) -> ModelSize | None:
    """The size of a model, built without data; None for a model with code of its own.

    Args:
        config: of the model.
        is_causal: whether it gets an output layer over the vocabulary. An embedding tied to it counts as multiplied.
    """
    if getattr(config, "auto_map", None):
        return None
    with torch.device("meta"):
        model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    text = config.get_text_config()
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    looked_up = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    embedded = sum(each.weight.numel() for each in looked_up)
    multiplied = sum(each.numel() for each in model.parameters()) - embedded
    output = text.vocab_size * text.hidden_size if is_causal else 0
    return ModelSize(
        embedded=embedded - (output if config.tie_word_embeddings else 0),
        multiplied=multiplied + output,
        linear=sum(each.weight.numel() for each in linear),
        adapter=sum(each.in_features + each.out_features for each in linear),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        heads=text.num_attention_heads,
        vocabulary=text.vocab_size,
    )
