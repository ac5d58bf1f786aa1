"""The widths of a transformer, by its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Widths:
    """What decides the activations of a layer.

    Attributes:
        layers: of the model.
        hidden: values of a token between layers.
        inner: values of a token in the feed-forward part.
        heads: of the attention.
        key_values: values of a token's keys, and again of its values; less than `hidden` with grouped queries.
        is_gated: whether one half of the feed-forward part gates the other.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    key_values: int
    is_gated: bool


def widths_of(config: PreTrainedConfig) -> Widths:
    """The widths of a model by its configuration."""
    values = config.get_text_config().to_dict()
    hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    size = int(values.get("head_dim") or hidden // heads)
    groups = int(values.get("num_key_value_heads") or heads)
    # ModernBERT, Gemma, and all that normalise as LLaMA does.
    is_gated = "hidden_activation" in values or values.get("rms_norm_eps") is not None
    inner = int(values.get("intermediate_size") or 4 * hidden)
    return Widths(int(values["num_hidden_layers"]), hidden, inner, heads, size * groups, is_gated)
