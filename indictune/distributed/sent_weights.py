"""Send the weights that rank 0 has read to the ranks that keep a part of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed import collectives
from indictune.distributed.convert_state import split_like
from indictune.models.causal import is_unread


def splits_one_model(launch: Launch) -> bool:
    """Whether ranks cut or split the model themselves; DeepSpeed and FSDP2 alone send weights by their own means."""
    return launch.axes.pipeline * launch.axes.tensor > 1 and launch.deepspeed is None


@contextmanager
def sent_weights(model: nn.Module, launch: Launch, args: TrainingArguments) -> Iterator[None]:
    """A block that cuts or splits a model in place. Then each rank that has not read the weights gets its own.

    All ranks must enter it. A rank holds its own weights and one more; rank 0 holds all until they are sent.
    """
    if not splits_one_model(launch):
        yield
        return
    has_unread = any(collectives.gather_from_all(is_unread(model)))
    whole = {name: each.detach() for name, each in model.named_parameters()} if has_unread else {}
    yield
    own = dict(model.named_parameters())
    for name in list(whole):
        _send(whole.pop(name), own.get(name), name, args)


@torch.no_grad()
def _send(whole: Tensor, own: Tensor | None, name: str, args: TrainingArguments) -> None:
    """Fill this rank's part of a weight; None if it is on other ranks."""
    is_first = args.process_index == 0
    sent = whole.to(args.device) if is_first else torch.empty_like(whole, device=args.device)
    torch.distributed.broadcast(sent.contiguous() if is_first else sent, 0)
    if own is not None and not is_first:
        own.copy_(split_like(own, sent, name))
