"""Attention within each document of an unpadded batch, registered as an attention function of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from indictune.upstream import flash_attention

ATTENTION = "indictune_unpadded"

# Neighbours share a padded attention while the longest is at most this many times as long as the shortest.
MOST_LENGTH_RATIO = 1.5

# With dropout, the kernel's backward pass of wider heads needs the shared memory of an A100 or H100. On other GPUs it
# computes no gradients, and torch does not refuse (FlashAttention 2, `run_mha_bwd_hdim256`).
WIDEST_WITH_DROPOUT = 192

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value, each [1, heads, tokens, width]


def unpadded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each document of a joined batch. Other batches go to transformers' sdpa.

    Args:
        query: [1, heads, tokens, width]; `key` and `value` likewise, with as many or fewer heads.
        sliding_window: how many tokens, itself included, a token sees to each side (in causal models to the left).

    Returns:
        [1, tokens, heads, width], and None in place of weights.
    """
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is None:
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    states = (query, key, value)
    longest = kwargs["max_length_q"]
    causal = bool(module.is_causal)
    if query.is_cuda:
        states = as_computed(states)
    has_kernel = query.is_cuda and _has_varlen_kernel(states[0].dtype, query.shape[-1], query.device)
    left = -1 if sliding_window is None else sliding_window - 1
    window = left, 0 if causal else left
    if has_kernel and dropout == 0:
        return _varlen_attention(states, boundaries, longest, scaling, window), None
    if has_kernel and query.shape[-1] <= WIDEST_WITH_DROPOUT:
        return _flash_attention(states, boundaries, longest, dropout, scaling, window), None
    if query.is_cuda and sliding_window is None and not causal:
        return _nested_attention(states, boundaries, longest, dropout, scaling), None
    return _attention_by_length(module, states, boundaries, dropout, scaling, sliding_window), None


def as_computed(states: States) -> States:
    """Cast to the type of autocast, if it is on: rotary positions (LLaMA's) return fp32."""
    kind = states[0].device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in states)
        return query, key, value
    return states


@cache
def _has_varlen_kernel(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Whether torch's kernel for sequences of many lengths (FlashAttention 2) supports such heads on this GPU."""
    is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)  # not T4 or V100
    return is_ampere and dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0


def _varlen_attention(
    states: States, boundaries: torch.Tensor, longest: int, scaling: float | None, window: tuple[int, int]
) -> torch.Tensor:
    """Attention by torch's kernel for sequences of many lengths."""
    query, key, value = _as_documents(states)
    options: dict[str, Any] = {"scale": scaling, "window_size": window, "enable_gqa": query.shape[1] > key.shape[1]}
    output: Any = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    return output[None]  # type: ignore[no-any-return]


def _flash_attention(
    states: States,
    boundaries: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """Attention with dropout. `_nested_attention` calls the same operation, but nested tensors cost host time."""
    left, right = window
    given = (boundaries, boundaries, longest, longest, dropout, window == (-1, 0), False)  # False: return no mask
    output = flash_attention(
        *_as_documents(states), *given, scale=scaling, window_size_left=left, window_size_right=right
    )
    return output[None]


def _as_documents(states: States) -> States:
    """[tokens, heads, width], as the kernel expects."""
    query, key, value = (each[0].transpose(0, 1) for each in states)
    return query, key, value


def _nested_attention(
    states: States, boundaries: torch.Tensor, longest: int, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Attention over a jagged nested tensor whose elements are the documents."""
    query, key, value = (
        # Given both bounds, torch does not read the boundaries, which waits for the GPU.
        torch.nested.nested_tensor_from_jagged(
            each[0].transpose(0, 1).contiguous(), boundaries, min_seqlen=1, max_seqlen=longest
        ).transpose(1, 2)
        for each in states
    )
    output: Any = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).values()[None]  # type: ignore[no-any-return]


def _attention_by_length(
    module: nn.Module,
    states: States,
    boundaries: torch.Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attention over one padded batch for each run of neighbours of similar length. Only this function pads."""
    dtype = states[0].dtype
    # torch's CPU kernel is slower in bf16 than in fp32 (2.13).
    computed = dtype if states[0].is_cuda else torch.float32
    gather, by_length = cast(Any, _Gathered).apply, _by_length(boundaries)
    sizes = [real.numel() for real in by_length.real]
    # [tokens, heads, width] again, contiguous for each token. Gather all runs at once: the gradient of each gather is
    # as large as all tokens.
    padded = (torch.split(gather(each[0].transpose(0, 1), by_length, False), sizes) for each in states)
    outputs = []
    for real, is_full, *run_states in zip(by_length.real, by_length.is_full, *padded, strict=True):
        # Copy once, to the type and memory order of the computation.
        query, key, value = (
            each.unflatten(0, real.shape).transpose(1, 2).to(computed, memory_format=torch.contiguous_format)
            for each in run_states
        )
        mask = _visible(real, is_full, bool(module.is_causal), sliding_window)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)
        outputs.append(output.flatten(0, 1).to(dtype))
    return gather(torch.cat(outputs), by_length, True)[None]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _ByLength:
    """The documents of a batch, padded run by run. A slot is one position of the padded runs.

    Attributes:
        slots: the token of each slot, int64 [slots].
        tokens: the slot of each token, int64 [tokens].
        padding: the slots without a token, int64 [slots - tokens].
        real: for each run, the slots with a token, bool [documents, longest].
        is_full: for each run, whether it has no padding.
    """

    slots: torch.Tensor
    tokens: torch.Tensor
    padding: torch.Tensor
    real: list[torch.Tensor]
    is_full: list[bool]


class _Gathered(torch.autograd.Function):
    """Gather tokens, [tokens, ...], into slots, [slots, ...], or `back`. The backward pass gathers, too: a token has
    one slot. The gradient of padding is zero.

    The backward pass of `index_select` adds row by row (torch 2.13), which takes ten times as long in bf16.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, by_length: _ByLength, back: bool) -> torch.Tensor:
        ctx.by_length, ctx.back = by_length, back
        return states.index_select(0, by_length.tokens if back else by_length.slots)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.back:
            return gradient.index_select(0, ctx.by_length.tokens), None, None
        of_slots = gradient.index_select(0, ctx.by_length.slots)
        return of_slots.index_fill_(0, ctx.by_length.padding, 0), None, None


@lru_cache(maxsize=1)
def _by_length(boundaries: torch.Tensor) -> _ByLength:
    """Computed once for all layers of a batch, because reading the boundaries waits for the GPU."""
    on_host = boundaries.cpu()
    lengths = on_host.diff()
    runs = [_slots(on_host[:-1][run], lengths[run]) for run in _runs(lengths.tolist())]
    slots = torch.cat([slots.flatten() for slots, _ in runs])
    is_real = torch.cat([real.flatten() for _, real in runs])
    device = boundaries.device
    return _ByLength(
        slots.to(device),
        is_real.nonzero()[:, 0].to(device),
        (~is_real).nonzero()[:, 0].to(device),
        [real.to(device) for _, real in runs],
        [bool(real.all()) for _, real in runs],
    )


def _runs(lengths: list[int]) -> Iterator[slice]:
    """Runs of neighbours whose longest is at most `MOST_LENGTH_RATIO` times as long as the shortest."""
    first = 0
    shortest = longest = lengths[0]
    for number, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if longest > MOST_LENGTH_RATIO * shortest:
            yield slice(first, number)
            first, shortest, longest = number, length, length
    yield slice(first, len(lengths))


def _slots(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each slot of some documents, int64 [documents, longest], and which slots have one, bool."""
    offsets = torch.arange(int(lengths.max()), device=lengths.device)
    real = offsets < lengths[:, None]
    return torch.where(real, starts[:, None] + offsets, 0), real


def _visible(real: torch.Tensor, is_full: bool, causal: bool, window: int | None) -> torch.Tensor | None:
    """True where a token (second but last dimension) sees another, bool [documents, 1, longest, longest].

    None if each token sees its whole document, or, in a causal model, all tokens before it.
    """
    longest = real.shape[1]
    if is_full and (window is None or longest <= window):
        return None
    sees = real[:, None, None].expand(-1, 1, longest, -1)
    numbers = torch.arange(longest, device=real.device)
    distance = numbers[:, None] - numbers
    if causal:
        sees = sees & (distance >= 0)
    if window is not None:
        sees = sees & (distance.abs() < window)
    return sees


def joined_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """No mask for a joined batch: transformers would make one of tokens x tokens."""
    if attention_mask is None:
        return None
    kwargs["attention_mask"] = attention_mask
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION, unpadded_attention)
AttentionMaskInterface.register(ATTENTION, joined_mask)
