"""Make a classifier that only labels faster on a CPU: packed weights, and a last layer for the first token alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from indictune.models.upstream import packed_linear, packed_weight

# ALBERT uses one layer again and again. The layers of others add the attention of all tokens to their states.
TYPES = ("bert", "roberta", "xlm-roberta")


def read_first_tokens(model: Any) -> None:
    """Shorten the last layer of a model of `TYPES`, which then gives [rows, 1, width]."""
    last = model.base_model.encoder.layer[-1]
    last.attention = _FirstTokenAttention(last.attention)


class _FirstTokenAttention(nn.Module):
    """The attention of BERT's last layer, with queries of first tokens alone."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.of_all, self.output = whole.self, whole.output

    def forward(
        self, states: torch.Tensor, *_: Any, cu_seq_lens_q: torch.Tensor, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """The states of first tokens, [rows, 1, width], and None in place of weights.

        Args:
            states: [1, tokens, width].
            cu_seq_lens_q: the start of each row, and the end of the last one, int [rows + 1].
        """
        first = states[0, cu_seq_lens_q[:-1]]
        heads = (-1, self.of_all.num_attention_heads, self.of_all.attention_head_size)
        query = self.of_all.query(first).view(heads)
        key, value = (of(states[0]).view(heads) for of in (self.of_all.key, self.of_all.value))
        attended = _attended(query, key, value, cu_seq_lens_q.diff(), self.of_all.scaling)
        return self.output(attended.flatten(1), first)[:, None], None


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of one query a row, [rows, heads, width].

    Args:
        query: [rows, heads, width].
        key: [tokens, heads, width]; `value` likewise.
        lengths: tokens of each row, int [rows].
        scaling: of the scores.
    """

    def reduced(values: torch.Tensor, how: str) -> torch.Tensor:
        # `unsafe` skips a check of the lengths, which waits for the GPU.
        return torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)

    row_of = torch.repeat_interleave(lengths, output_size=len(key))
    scores = (query.float()[row_of] * key).sum(-1) * scaling  # [tokens, heads]
    powers = (scores - reduced(scores, "max")[row_of]).exp()
    shares = powers / reduced(powers, "sum")[row_of]
    return reduced(shares[..., None] * value, "sum").to(value.dtype)


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
        self.weight = packed_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """From [..., in_features] to [..., out_features]."""
        rows = states.flatten(0, -2)
        filled = functional.pad(rows, (0, 0, 0, -len(rows) % _MULTIPLE))
        found = packed_linear(filled, self.weight, self.bias, self.activation)
        return found[: len(rows)].view(*states.shape[:-1], -1)
