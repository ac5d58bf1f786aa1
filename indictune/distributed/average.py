"""Average gradients that no wrapper of the model averages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from indictune.distributed.sharding import local_part


def average_gradients(trained: Iterable[Parameter], group: ProcessGroup, sum_in: torch.dtype | None = None) -> None:
    """Average the gradients of weights, or of this rank's parts of them, over a group. All its ranks must call it.

    Args:
        trained: those without a gradient are passed over, on all ranks alike.
        group: of the ranks.
        sum_in: the type of the sums; None is each gradient's own.
    """
    local = [local_part(each.grad) for each in trained if each.grad is not None]
    sums = [each.to(sum_in or each.dtype) for each in local]  # the same tensors, if they are of this type
    for work in [torch.distributed.all_reduce(each, group=group, async_op=True) for each in sums]:
        assert work is not None
        work.wait()
    torch._foreach_div_(sums, group.size())
    torch._foreach_copy_(local, sums)
