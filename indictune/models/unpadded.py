"""Models that read a batch as one sequence without padding, each row seeing itself alone.

`JoinRows` makes such batches. The model's own `forward` runs, so that whatever a strategy hooks into it still fires:
rows are kept apart by an attention function, and a classifier's head gets each row's own token, or the mean of its
tokens, by a forward hook.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from indictune.errors import UserError

logger = logging.getLogger(__name__)

# Rows up to so many times as long as the shortest of their run share a padded attention.
LIKE_LENGTH = 1.5

# Fewer heads of key and value than of query: the kernel takes them from torch 2.12 on.
_TAKES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value, each [1, heads, tokens, width]

ATTENTION = "indictune_unpadded"

# Each is compared with the padded model in tests/models/test_unpadded.py.
CLASSIFIERS = ("albert", "bert", "llama", "modernbert", "roberta", "xlm-roberta")
CAUSAL = ("gemma", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
CAUSAL_ATTENTION = (None, "sdpa")


def why_padded(config: PreTrainedConfig, attn_implementation: str | None, own_code: bool = False) -> str | None:
    """Why a classifier has to pad its rows, or None if it need not.

    Args:
        config: of the model.
        attn_implementation: the attention that the user named, if any.
        own_code: the model's class comes with its files, and may read any token, or see any.
    """
    return _why_padded(config, attn_implementation, own_code, CLASSIFIERS, [None])


def _why_padded(
    config: PreTrainedConfig,
    attn_implementation: str | None,
    own_code: bool,
    types: Collection[str],
    attentions: Collection[str | None],
) -> str | None:
    """As `why_padded`, of models of these types with one of these attentions."""
    if own_code:
        return "the model has code of its own, which is not known to keep joined rows apart"
    if config.model_type not in types:
        return f"models of the type {config.model_type} are not known to work without it ({', '.join(types)} are)"
    if attn_implementation not in attentions:
        return f"--attn_implementation {attn_implementation} needs it"
    return None


def pads(
    padding_free: Literal["auto", "on", "off"],
    config: PreTrainedConfig,
    attn_implementation: str | None,
    own_code: bool = False,
) -> bool:
    """Whether a classifier's rows are padded.

    Args:
        padding_free: `--padding_free`.

    The others as of `why_padded`.

    Raises:
        UserError: `on`, and the model cannot do without padding.
    """
    reason = why_padded(config, attn_implementation, own_code)
    if reason is not None and padding_free == "on":
        raise UserError(f"--padding_free on: {reason}. Leave it out, and rows are padded by length.")
    if reason is not None and padding_free == "auto":
        _tell(reason)
    return reason is not None or padding_free == "off"


def pads_causal(config: PreTrainedConfig, attn_implementation: str | None, own_code: bool = False) -> bool:
    """Whether the rows of a causal language model are padded; arguments as of `why_padded`."""
    reason = _why_padded(config, attn_implementation, own_code, CAUSAL, CAUSAL_ATTENTION)
    if reason is not None:
        _tell(reason)
    return reason is not None


def _tell(reason: str) -> None:
    logger.warning("Rows are padded, rows of like length together: %s.", reason)


def reads_unpadded(config: PreTrainedConfig, attn_implementation: str | None) -> bool:
    """Whether a causal language model with this attention, or the default, may be given to `read_unpadded`."""
    return config.model_type in CAUSAL and attn_implementation in CAUSAL_ATTENTION


def uncounted_token(config: PreTrainedConfig) -> int | None:
    """The token that has no position of its own, where the model counts only the others: RoBERTa's padding."""
    return int(config.pad_token_id) if config.model_type in ("roberta", "xlm-roberta") else None


def read_unpadded(model: nn.Module) -> None:
    """Let a causal language model, or an adapter on one, read batches of `JoinRows`, beside padded ones."""
    _own(model).set_attn_implementation(ATTENTION)


def classify_unpadded(model: nn.Module) -> None:
    """Let a classifier for which `why_padded` is None read batches of `JoinRows`. Its logits are [rows, labels].

    Padded batches it reads as before.
    """
    own = _own(model)
    own.set_attn_implementation(ATTENTION)
    if own.config.model_type == "llama":
        last = _LastTokens(own.config.pad_token_id)
        own.score.register_forward_hook(last.keep)
        own.register_forward_hook(last.choose, with_kwargs=True)
    else:
        # BERT's and ALBERT's pooler belongs to the base model, and reads what their encoder gives.
        base = own.base_model
        is_modern = own.config.model_type == "modernbert"
        encoder = base if is_modern else base.encoder
        takes_means = is_modern and own.config.classifier_pooling == "mean"
        encoder.register_forward_hook(_means if takes_means else _first_tokens, with_kwargs=True)


def _own(model: nn.Module) -> Any:
    """The model of transformers, without the adapter around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _first_tokens(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: of each row the first token's state, as [rows, 1, width]."""
    if "cu_seq_lens_q" in kwargs:
        starts = kwargs["cu_seq_lens_q"][:-1]
        output.last_hidden_state = output.last_hidden_state[0, starts][:, None]
    return output


def _means(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: of each row the mean of its tokens' states, as [rows, 1, width]."""
    if "cu_seq_lens_q" in kwargs:
        states, lengths = output.last_hidden_state[0], kwargs["cu_seq_lens_q"].diff()
        # `unsafe`: else a GPU would be waited for to check the lengths.
        means = torch.segment_reduce(states.float(), "mean", lengths=lengths, axis=0, unsafe=True)
        output.last_hidden_state = means[:, None].to(states.dtype)
    return output


class _LastTokens:
    """Forward hooks that give a classifier of the kind of LLaMA the logits of each row's last token.

    transformers chooses them after the head, by the number of rows in `input_ids`, which is one here. As there, the
    last token is the last that is not the padding's, which may stand in a text: many tokenizers pad by the end token.
    """

    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id = pad_token_id

    def keep(self, module: nn.Module, args: tuple[Any, ...], logits: torch.Tensor) -> None:
        """Of the head: remember the logits of all tokens, [1, tokens, labels]."""
        self._logits = logits

    def choose(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Of the whole model: its logits become [rows, labels]."""
        if "cu_seq_lens_q" in kwargs:
            last = _last_tokens(kwargs["input_ids"][0], kwargs["cu_seq_lens_q"], self.pad_token_id)
            output.logits = self._logits[0, last]
        del self._logits
        return output


def _last_tokens(input_ids: torch.Tensor, boundaries: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """Where each row's last token stands that is not padding, or its first where all are; int64 [rows].

    Args:
        input_ids: [tokens] of all rows.
        boundaries: [rows + 1], where each row begins and the last one ends.
        pad_token_id: or None.
    """
    starts = boundaries[:-1].long()
    if pad_token_id is None:
        return boundaries[1:].long() - 1
    places = torch.arange(len(input_ids), device=input_ids.device)
    row_of = torch.bucketize(places, boundaries[1:].long(), right=True)
    return starts.scatter_reduce(0, row_of, places * (input_ids != pad_token_id), "amax")


def _attention(
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
    """Attention within each document of a joined batch; any other batch is left to transformers' sdpa.

    Args:
        query: [1, heads, tokens, width]; `key` and `value` likewise, of as many or fewer heads.
        sliding_window: how many tokens, itself included, one sees to each side (to the left, in causal models).

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
        states = _as_computed(states)
    if query.is_cuda and states[0].dtype in (torch.float16, torch.bfloat16) and dropout == 0:
        left = -1 if sliding_window is None else sliding_window - 1
        return _varlen_attention(states, boundaries, longest, scaling, (left, 0 if causal else left)), None
    if query.is_cuda and sliding_window is None and not causal:
        # Unlike `varlen_attn`, it has dropout and fp32.
        return _nested_attention(states, boundaries, longest, dropout, scaling), None
    return _attention_by_length(module, states, boundaries, dropout, scaling, sliding_window), None


def _as_computed(states: States) -> States:
    """In the type of autocast, where it is on: rotary positions (LLaMA's) make fp32 of what it has computed."""
    kind = states[0].device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in states)
        return query, key, value
    return states


def _varlen_attention(
    states: States, boundaries: torch.Tensor, longest: int, scaling: float | None, window: tuple[int, int]
) -> torch.Tensor:
    """Attention by torch's kernel for sequences of many lengths."""
    query, key, value = (each[0].transpose(0, 1) for each in states)
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    heads_of_group = query.shape[1] // key.shape[1]
    if heads_of_group > 1 and _TAKES_GROUPS:
        options["enable_gqa"] = True
    elif heads_of_group > 1:
        key, value = (each.repeat_interleave(heads_of_group, 1) for each in (key, value))
    output: Any = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    return output[None]  # type: ignore[no-any-return]


def _nested_attention(
    states: States, boundaries: torch.Tensor, longest: int, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Attention over a jagged nested tensor whose elements are the documents."""
    query, key, value = (
        # With both bounds told, torch need not read the boundaries to learn them.
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
    """Attention over one padded batch for each run of neighbours of like length; only here is anything padded."""
    dtype = states[0].dtype
    # As [tokens, heads, width] again, where a token's states lie side by side.
    flat = [each[0].transpose(0, 1) for each in states]
    if not states[0].is_cuda:  # torch's kernel for CPUs takes longer in bf16 than in fp32 (2.13)
        flat = [each.float() for each in flat]
    by_length = _by_length(boundaries)
    sizes = [real.numel() for real in by_length.real]
    # All runs are gathered at once: the gradient of each gathering is as large as all tokens.
    padded = (torch.split(each.index_select(0, by_length.places), sizes) for each in flat)
    outputs = []
    for real, is_full, *run_states in zip(by_length.real, by_length.is_full, *padded, strict=True):
        query, key, value = (each.unflatten(0, real.shape).transpose(1, 2) for each in run_states)
        mask = _visible(real, is_full, bool(module.is_causal), sliding_window)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)
        outputs.append(output.flatten(0, 1))
    return torch.cat(outputs).index_select(0, by_length.tokens)[None].to(dtype)


@dataclass(frozen=True)
class _ByLength:
    """The documents of a batch, padded run by run.

    Attributes:
        places: the token that each place of all runs takes, int64 [places].
        tokens: the place of each token, int64 [tokens].
        real: of each run, which places are no padding, bool [documents, longest].
        is_full: of each run, whether all are.
    """

    places: torch.Tensor
    tokens: torch.Tensor
    real: list[torch.Tensor]
    is_full: list[bool]


@lru_cache(maxsize=1)
def _by_length(boundaries: torch.Tensor) -> _ByLength:
    """Found once for all layers of a batch, because a GPU is waited for to read the boundaries."""
    on_host = boundaries.cpu()
    lengths = on_host.diff()
    runs = [_places(on_host[:-1][run], lengths[run]) for run in _runs(lengths.tolist())]
    places = torch.cat([places.flatten() for places, _ in runs])
    tokens = torch.cat([real.flatten() for _, real in runs]).nonzero()[:, 0]
    device = boundaries.device
    return _ByLength(
        places.to(device),
        tokens.to(device),
        [real.to(device) for _, real in runs],
        [bool(real.all()) for _, real in runs],
    )


def _runs(lengths: list[int]) -> Iterator[slice]:
    """Runs of neighbours of which the longest is at most `LIKE_LENGTH` times as long as the shortest."""
    first = 0
    shortest = longest = lengths[0]
    for number, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if longest > LIKE_LENGTH * shortest:
            yield slice(first, number)
            first, shortest, longest = number, length, length
    yield slice(first, len(lengths))


def _places(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of some documents stand, int64 [documents, longest], and which of these are theirs."""
    offsets = torch.arange(int(lengths.max()), device=lengths.device)
    real = offsets < lengths[:, None]
    return torch.where(real, starts[:, None] + offsets, 0), real


def _visible(real: torch.Tensor, is_full: bool, causal: bool, window: int | None) -> torch.Tensor | None:
    """True where a token (second but last dimension) sees another, bool [documents, 1, longest, longest].

    None where it sees all of its document, or, in a causal model, all that lies before it.
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


def _mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """No mask for a joined batch, which has none of its own; transformers would make one of tokens x tokens."""
    if attention_mask is None:
        return None
    kwargs["attention_mask"] = attention_mask
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
