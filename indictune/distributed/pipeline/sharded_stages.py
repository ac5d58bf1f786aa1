"""Split the weights of a stage over the ranks that train copies of it, with FSDP2."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from indictune.distributed.pipeline.stages import Stages


def shard(model: nn.Module, stages: Stages, copies: DeviceMesh) -> nn.Module:
    """Shard a rank's only stage in place: each layer, and the rest as one group.

    Args:
        model: with an adapter around it, if any.
        stages: of the rank, one.
        copies: the ranks with the same stage.

    Returns:
        What the stage calls, the root of what is sharded.
    """
    for block in stages.own_blocks:
        fully_shard(block, mesh=copies)
    (number,) = stages.numbers
    root = stages.body if stages.has_next(number) else model
    fully_shard(root, mesh=copies)
    return root


def sum_with(root: nn.Module, is_last: bool) -> None:
    """Sum gradients over the copies in the next backward pass, if it is the last one of the step; else keep them."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)
