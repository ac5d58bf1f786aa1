"""Private names of transformers and torch that models need.

tests/training/test_contract.py holds every name, and says what to do when one goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention function of a model by its name. transformers (5.23) has a public setter and no public getter."""
    chosen: str | None = config._attn_implementation
    return chosen


def weight_conversions(model: nn.Module) -> list[Any]:
    """What transformers (5.23) did to the weights of a checkpoint when it read them. Saving reverses it."""
    return vars(model).get("_weight_conversions") or []


def set_weight_conversions(model: PreTrainedModel, conversions: list[Any] | None) -> None:
    """Decide what saving reverses; None is nothing."""
    vars(model)["_weight_conversions"] = conversions


def flash_attention(*given: Any, **settings: Any) -> torch.Tensor:
    """The operation below torch's `varlen_attn`, which itself has no dropout (torch 2.13)."""
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(*given, **settings)[0]
    return output


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out_features, in_features] in the order of oneDNN, which torch (2.13) offers only to its compiler."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def packed_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """A linear layer by a `packed_weight`, and the activation after it: `none` or `gelu`, by the error function.

    [rows, in_features] to [rows, out_features].
    """
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, activation, [], "none")
    return found
