"""The transformers model inside an adapter."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import nn


def own_model(model: nn.Module) -> Any:
    """The transformers model, without the adapter around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
