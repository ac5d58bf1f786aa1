"""Attention of the tokens of one rank to those of its whole context group.

Ranks of a context group have different tokens of the same rows. In each layer they gather all keys and values, as the
training of LLaMA 3 does (Grattafiori et al. 2024, section 3.3.2). torch's ring attention (2.13) has no kernel for the
CPU and keeps no joined rows apart; accelerate (1.15) would run that one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.context_rows import PART, Part
from indictune.models.attention import as_computed, joined_mask, unpadded_attention
from indictune.models.own_model import own_model

ATTENTION = "indictune_context"


def share_tokens(model: nn.Module, launch: Launch, args: TrainingArguments) -> ProcessGroup | None:
    """Let a model that `check_context` accepts read the parts of `OwnTokens`, if the run has a context axis.

    All ranks must call it. The model reads whole sequences as before.

    Returns:
        The ranks that share the tokens of a row.
    """
    ranks = launch.axes.context
    if ranks == 1:
        return None
    mesh = init_device_mesh(args.device.type, (launch.world_size // ranks, ranks), mesh_dim_names=("data", "context"))
    group: ProcessGroup = mesh["context"].get_group()
    use_group(model, group)
    return group


def use_group(model: nn.Module, group: ProcessGroup) -> None:
    """Let a model, or an adapter on one, gather keys and values in a group."""
    AttentionInterface.register(ATTENTION, partial(_attention, group))
    AttentionMaskInterface.register(ATTENTION, joined_mask)
    own_model(model).set_attn_implementation(ATTENTION)


def _attention(
    group: ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of own tokens, [rows, heads, own tokens, width], within each document.

    Returns:
        [rows, own tokens, heads, width], and None in place of weights.
    """
    part = kwargs.get(PART)
    if part is None:
        given = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, **kwargs}
        return unpadded_attention(module, query, key, value, attention_mask, **given)
    query, key, value = as_computed((query, key, value))
    keys, values = cast(Any, _Gathered).apply(torch.stack([key, value]), part, group)
    settings: dict[str, Any] = {"dropout_p": dropout, "scale": scaling, "enable_gqa": query.shape[1] > key.shape[1]}
    outputs, begun = [], 0
    for count, seen in part.seen:
        own, tokens = query[:, :, begun : begun + count], slice(seen.start, seen.stop)
        begun += count
        mask = _mask(count, len(seen), sliding_window, query.device)
        outputs.append(
            functional.scaled_dot_product_attention(own, keys[:, :, tokens], values[:, :, tokens], mask, **settings)
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """What the last `queries` of some tokens see of them."""
    if window is None or keys <= window:
        return causal_lower_right(queries, keys)
    numbers = torch.arange(keys, device=device)
    distance = numbers[-queries:, None] - numbers
    return (distance >= 0) & (distance < window)


class _Gathered(torch.autograd.Function):
    """All tokens of a sequence, [2, rows, heads, tokens, width], from the parts of each rank.

    The gradient of a token is the sum of what all ranks have for it.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: Part, group: ProcessGroup) -> Tensor:
        ctx.part, ctx.group = part, group
        padded = functional.pad(own, (0, 0, 0, part.most_tokens - own.shape[3])).contiguous()
        parts = padded.new_empty(part.ranks, *padded.shape)
        torch.distributed.all_gather_single(parts.flatten(0, 1), padded, group=group)
        pieces: list[Tensor] = [own] * 2 * part.ranks
        for rank, tokens in enumerate(parts):
            first, last = map(len, part.pieces_of(rank))
            pieces[rank], pieces[-1 - rank], _ = tokens.split([first, last, part.most_tokens - first - last], 3)
        return torch.cat(pieces, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        part: Part = ctx.part
        rows = gradient.shape[:3]
        parts = gradient.new_zeros(part.ranks, *rows, part.most_tokens, gradient.shape[-1])
        for rank, tokens in enumerate(parts):
            first, last = part.pieces_of(rank)
            tokens[:, :, :, : len(first)] = gradient[:, :, :, first.start : first.stop]
            tokens[:, :, :, len(first) : len(first) + len(last)] = gradient[:, :, :, last.start : last.stop]
        own = parts.new_empty(parts.shape[1:])
        torch.distributed.reduce_scatter_single(own, parts.flatten(0, 1), group=ctx.group)
        kept = sum(map(len, part.pieces_of(part.rank)))
        return own[:, :, :, :kept], None, None
