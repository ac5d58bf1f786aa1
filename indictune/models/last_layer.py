"""Compute a classifier's last layer for the first token of each row alone: its head reads no other.

All tokens still give keys and values, so the logits are the same. This is for labelling joined batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
