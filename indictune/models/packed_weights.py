"""Keep the weights of linear layers in the order that the CPU's kernels read, for a model that only labels.

oneDNN multiplies faster than torch's `Linear`, and computes BERT's activation before it writes a result. torch's own
compiler (inductor) uses these operations, too. They are not public (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from indictune.models.last_layer import TYPES

# oneDNN compiles code for each number of tokens, and keeps it: hundreds of MB without this.
_MULTIPLE = 64


def can_pack(model: nn.Module) -> bool:
    """Whether a model is on the CPU in fp32, and torch was built with oneDNN."""
    kinds = {(each.device.type, each.dtype) for each in model.parameters()}
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and kinds == {("cpu", torch.float32)}


def pack_weights(model: Any) -> None:
    """Replace all linear layers. The model then has no weights to train or to save.

    Args:
        model: of transformers, without an adapter around it, for which `can_pack` holds.
    """
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                setattr(module, name, _PackedLinear(layer))
    if model.config.model_type in TYPES and model.config.hidden_act == "gelu":
        for layer in model.base_model.encoder.layer:
            layer.intermediate.dense.activation = "gelu"
            layer.intermediate.intermediate_act_fn = nn.Identity()


class _PackedLinear(nn.Module):
    """A linear layer, and the activation after it."""

    activation = "none"

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """From [..., in_features] to [..., out_features]."""
        rows = states.flatten(0, -2)
        filled = functional.pad(rows, (0, 0, 0, -len(rows) % _MULTIPLE))
        # The second "none" is for GELU: by the error function.
        given: tuple[Any, ...] = (self.weight, self.bias, self.activation, [], "none")
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, *given)
        return found[: len(rows)].view(*states.shape[:-1], -1)
