"""DDP: the buckets in which replicas send their gradients, and the type in which they sum them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from indictune.config.arguments import IndicTrainingArguments


def settle_buckets(model: nn.Module, step: Callable[[], object]) -> None:
    """Run backward passes until DDP sends gradients in the buckets that it keeps from then on.

    DDP (torch 2.13) sends one bucket until it knows the order of the gradients, and then several. With three ranks or
    more, the buckets decide in which order gradients are added: a resumed run would differ in the last bit. The
    gradients of a step, the forward and backward pass of a micro-batch, are dropped.
    """
    if not isinstance(model, DistributedDataParallel) or not (passes := passes_until_settled(model)):
        return
    before, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    for _ in range(passes):
        step()
    model.require_backward_grad_sync = before
    model.zero_grad()


def passes_until_settled(model: DistributedDataParallel) -> int:
    """How many backward passes come before the buckets stay as they are; 0 where they do not matter."""
    if torch.distributed.get_world_size() < 3:
        return 0
    if model.static_graph:
        return 2  # the first pass finds out which parameters have a gradient
    return 0 if model.find_unused_parameters else 1


def gradient_buckets(args: IndicTrainingArguments) -> DistributedDataParallelKwargs:
    """How replicas sum their gradients.

    The Trainer (5.23) looks for unused parameters in every forward pass unless activations are checkpointed. It keeps
    each gradient twice, and broadcasts constant buffers before every forward pass. With a static graph torch looks for
    unused parameters once. Some models have them (XLNet).
    """
    # torch 2.13 fails under accumulation with a static graph: "expect_autograd_hooks_ INTERNAL ASSERT FAILED".
    static_graph = args.gradient_accumulation_steps == 1 if args.ddp_static_graph is None else args.ddp_static_graph
    looks = args.ddp_find_unused_parameters
    if looks is None:
        looks = not (static_graph or args.gradient_checkpointing)
    given = {"bucket_cap_mb": args.ddp_bucket_cap_mb} if args.ddp_bucket_cap_mb is not None else {}
    kind = SumsInBfloat16 if args.reduce_dtype == "bfloat16" else DistributedDataParallelKwargs
    return kind(
        broadcast_buffers=bool(args.ddp_broadcast_buffers),
        find_unused_parameters=looks,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        **given,
    )


class SumsInBfloat16(DistributedDataParallelKwargs):  # type: ignore[misc]
    """accelerate's settings of DDP, which then sums gradients in bfloat16."""

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Add torch's bf16 hook by another name, when accelerate has made the DDP.

        torch 2.13 refuses its own by name without NCCL, though it works on gloo.
        """
        model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
