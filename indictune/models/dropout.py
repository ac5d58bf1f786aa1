"""One probability for every dropout of a model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig


def set_config_dropout(config: PreTrainedConfig, probability: float) -> None:
    """Set every field of the configuration that is a dropout probability, before the model is made from it.

    The field names differ by architecture (`hidden_dropout_prob`, `attention_dropout`, `resid_pdrop`, ...), and some
    are None to follow another one. Attention reads the configuration, not a module, so the fields themselves count.
    """
    for field, value in config.to_dict().items():
        if "drop" in field and (value is None or (type(value) in (int, float) and 0 <= value <= 1)):
            setattr(config, field, probability)


def set_module_dropout(model: nn.Module, probability: float) -> None:
    """Set every `nn.Dropout`, also those that code outside transformers made from fields of other names."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
