"""Context parallelism: which tokens each rank has, and their attention to the whole context group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, TrainingArguments

from indictune.config.chat_arguments import PairArguments
from indictune.config.plan import AnyPlan, Launch
from indictune.data.collation import IGNORED_LABEL, Row
from indictune.errors import Problem, problem
from indictune.models.attention import as_computed, joined_mask, unpadded_attention
from indictune.models.load import without_adapter
from indictune.models.unpadded import CAUSAL, why_not_joined
from indictune.tasks.protocol import Collator

PART = "context_part"  # a rank's part, among the inputs of a model


@dataclass(frozen=True)
class Part:
    """The tokens of a sequence that one rank has.

    The sequence is cut into twice as many pieces as there are ranks. The first rank has the first piece and the last,
    the second rank those within, and so on: a later token sees more tokens, and so each rank computes as much as the
    others (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2).
    """

    boundaries: tuple[int, ...]  # the start of each document in the sequence, and the end of the last one
    rank: int  # of the context group
    ranks: int  # in the group

    @cached_property
    def pieces(self) -> list[range]:
        """Tokens of each piece, in the order of the sequence."""
        tokens, count = self.boundaries[-1], 2 * self.ranks
        cuts = [number * tokens // count for number in range(count + 1)]
        return [range(start, end) for start, end in pairwise(cuts)]

    def pieces_of(self, rank: int) -> tuple[range, range]:
        """Those of a rank, which it keeps in this order."""
        return self.pieces[rank], self.pieces[-1 - rank]

    @cached_property
    def most_tokens(self) -> int:
        """Of any rank."""
        return max(sum(map(len, self.pieces_of(rank))) for rank in range(self.ranks))

    @cached_property
    def seen(self) -> list[tuple[int, range]]:
        """For each run of own tokens in one document, their number and the tokens that the last of them sees."""
        return [
            (min(end, piece.stop) - max(start, piece.start), range(start, min(end, piece.stop)))
            for piece in self.pieces_of(self.rank)
            for start, end in pairwise(self.boundaries)
            if max(start, piece.start) < min(end, piece.stop)
        ]

    def own(self, values: Tensor) -> Tensor:
        """This rank's part of [rows, tokens]."""
        return torch.cat([values[:, piece.start : piece.stop] for piece in self.pieces_of(self.rank)], 1)


class OwnTokens:
    """Collates a micro-batch, of which the rank keeps its part.

    Labels are shifted before, because the next token may be on another rank. TRL reads `shift_labels`; the Trainer
    counts them where `labels` are, too. The collator gives both and `input_ids` as [rows, tokens], padded on the right
    or joined.
    """

    def __init__(self, collator: Collator, rank: int, ranks: int) -> None:
        self.collator = collator
        self.rank, self.ranks = rank, ranks

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """`input_ids`, `position_ids`, `labels` and `shift_labels`, int64 [rows, own tokens]; the `Part` as `PART`;
        and, for evaluation, `row_numbers`."""
        batch = self.collator(rows)
        input_ids, labels = batch["input_ids"], batch["labels"]
        positions = batch.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids))
        boundaries = batch["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in batch else [0, input_ids.shape[1]]
        missing = max(0, self.ranks - boundaries[-1])  # no rank is without a token
        boundaries[-1] += missing
        part = Part(tuple(boundaries), self.rank, self.ranks)
        shifted = functional.pad(labels[:, 1:], (0, 1 + missing), value=IGNORED_LABEL)
        own = {
            "input_ids": part.own(functional.pad(input_ids, (0, missing))),
            "position_ids": part.own(functional.pad(positions, (0, missing))),
            "labels": part.own(shifted),
            "shift_labels": part.own(shifted),
        }
        return {PART: part, **own} | {name: batch[name] for name in ("row_numbers",) if name in batch}


_OTHER_FILE = "Use accelerate_configs/ddp.yaml or fsdp2.yaml"
_LEAVE_OUT = "Leave out the flag, or use accelerate_configs/fsdp2.yaml"


def check_context(plan: AnyPlan) -> list[Problem]:
    """Refuse models and flags that context parallelism does not have."""
    if plan.launch.axes.context == 1:
        return []
    model, config, refused = plan.model, plan.model_config, list[tuple[str, object, str, str]]()
    if plan.head != "ForCausalLM":
        name, reason = "model_name_or_path", "only causal language models share the tokens of a row"
        refused.append((name, model.model_name_or_path, reason, _OTHER_FILE))
    elif config is not None and (reason := why_not_joined(model, config, CAUSAL) or ""):
        is_flag = why_not_joined(replace(model, attn_implementation=None), config, CAUSAL) is None
        name = "attn_implementation" if is_flag else "model_name_or_path"
        refused.append((name, getattr(model, name), reason, _LEAVE_OUT if is_flag else _OTHER_FILE))
    if plan.training.torch_compile:
        refused.append(("torch_compile", "true", "no test compares it with one process", _LEAVE_OUT))
    of_pairs = isinstance(plan.data, PairArguments)
    return [problem("pairs-over-context", "strategy", plan.launch.strategy)] * of_pairs + [
        problem("not-under-context", f"--{name}", value, strategy=plan.launch.strategy, reason=reason, instead=instead)
        for name, value, reason, instead in refused
    ]


ATTENTION = "indictune_context"


def share_tokens(model: nn.Module, launch: Launch, args: TrainingArguments) -> ProcessGroup:
    """Let a model that `check_context` accepts read the parts of `OwnTokens`.

    All ranks must call it. The model reads whole sequences as before.

    Returns:
        The ranks that share the tokens of a row.
    """
    ranks = launch.axes.context
    mesh = init_device_mesh(args.device.type, (launch.world_size // ranks, ranks), mesh_dim_names=("data", "context"))
    group: ProcessGroup = mesh["context"].get_group()
    use_group(model, group)
    return group


def use_group(model: nn.Module, group: ProcessGroup) -> None:
    """Let a model, or an adapter on one, gather keys and values in a group."""
    AttentionInterface.register(ATTENTION, partial(_attention, group))
    AttentionMaskInterface.register(ATTENTION, joined_mask)
    without_adapter(model).set_attn_implementation(ATTENTION)


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
