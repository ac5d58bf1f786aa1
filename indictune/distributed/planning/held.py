"""Bytes of the weights, gradients and optimizer states that this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

PARTS = ("parameters", "gradients", "optimizer_states")


def held_bytes(
    model: nn.Module, optimizer: Optimizer | None = None, counted: dict[int, torch.Tensor] | None = None
) -> dict[str, int]:
    """Bytes of this process by part of `PARTS`, each tensor once.

    DeepSpeed (0.19) gives torch's optimizer shards of its own, one group of parameters after the other, and keeps
    those of ZeRO-3 in `ds_tensor`.

    Args:
        model: in training.
        optimizer: torch's; None before there is one.
        counted: tensors that are left out, by address; those found are added.
    """
    counted = {} if counted is None else counted
    groups = [] if optimizer is None else optimizer.param_groups
    both = [*model.parameters(), *(each for group in groups for each in group["params"])]
    states = [] if optimizer is None else optimizer.state.values()
    parts = (
        [*both, *(vars(each)["ds_tensor"] for each in both if "ds_tensor" in vars(each)), *_scales(both)],
        [*(each.grad for each in both), *_whole_gradients(model)],
        [value for state in states for value in state.values()],
    )
    return {name: _bytes_of(each, counted) for name, each in zip(PARTS, parts, strict=True)}


def held_by(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """As `held_bytes`, of a Trainer's model and its optimizer, which accelerate (1.15) and DeepSpeed (0.19) wrap.

    DeepSpeed keeps gradients, and the weights that ZeRO-3 updates, by names of its own.
    """
    copies, gradients = list[Any](), list[Any]()
    while isinstance(optimizer, AcceleratedOptimizer) or not isinstance(optimizer, Optimizer | None):
        own = vars(optimizer)
        copies += own.get("fp32_partitioned_groups_flat", ())
        if "grad_partitions_flat_buffer" in own:  # of ZeRO-3, whose other names are views of it
            gradients.append(own["grad_partitions_flat_buffer"])
        else:
            groups = [*own.get("averaged_gradients", {}).values(), *own.get("all_grad_tensors", {}).values()]
            gradients += [each for group in groups for each in group or ()]
        optimizer = optimizer.optimizer
    counted = dict[int, torch.Tensor]()
    found = held_bytes(model, optimizer, counted)
    found["parameters"] += _bytes_of(copies, counted)
    found["gradients"] += _bytes_of(gradients, counted)
    return found


def _whole_gradients(model: nn.Module) -> Iterator[Any]:
    """The gradients that FSDP2 (torch 2.13) has not scattered yet, which no parameter of the model shows.

    The module that FSDP2 shards at the root of a pipeline's stage is outside the model.
    """
    states = [each._get_fsdp_state() for each in model.modules() if isinstance(each, FSDPModule)]
    states += [other for each in states for other in each._state_ctx.all_states]
    for each in {own for state in states for group in state._fsdp_param_groups for own in group.fsdp_params}:
        unsharded = vars(each).get("_unsharded_param")  # there is none before the first forward pass
        yield from (each.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad)


def _scales(parameters: Iterable[nn.Parameter]) -> Iterator[Any]:
    """The tensors that unpack 4-bit weights (bitsandbytes 0.50, `QuantState`)."""
    for each in parameters:
        state = getattr(each, "quant_state", None)
        while state is not None:
            yield from (state.absmax, state.code)
            state = state.state2


def _bytes_of(values: Iterable[Any], counted: dict[int, torch.Tensor]) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            local = value.to_local() if isinstance(value, DTensor) else value.detach()
            total += local.nbytes if local.data_ptr() not in counted else 0
            counted[local.data_ptr()] = local
    return total
