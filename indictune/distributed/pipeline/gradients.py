"""Gradients of a model whose stages and copies are on different ranks: their sums and their norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from indictune.distributed.average import average_gradients
from indictune.distributed.sharding import local_part


class StageGradients:
    """The gradients of one rank's stages.

    Args:
        model: with the parameters of the rank.
        stages_group: the ranks of this pipeline.
        copies_group: the ranks with the same stages and other rows; None if FSDP2 sums over them.
        tied: gives the weight that the first and the last stage both have, on their ranks; else None.
        ends_group: the ranks of the first and the last stage, on these; else None.
        counts_tied: whether this rank counts the tied weight in the norm. One of the two does.
    """

    def __init__(
        self,
        model: nn.Module,
        stages_group: ProcessGroup,
        copies_group: ProcessGroup | None,
        tied: Callable[[], nn.Parameter | None] = lambda: None,
        ends_group: ProcessGroup | None = None,
        counts_tied: bool = True,
    ) -> None:
        self._model, self._stages_group, self._copies_group = model, stages_group, copies_group
        self._tied, self._ends_group, self._counts_tied = tied, ends_group, counts_tied

    def sum(self) -> None:
        """Sum both gradients of a tied weight, and average gradients over the copies. All ranks must call it."""
        tied = self._tied()
        if tied is not None and tied.grad is not None:
            torch.distributed.all_reduce(local_part(tied.grad), group=self._ends_group)
        if self._copies_group is not None:
            average_gradients(self._model.parameters(), self._copies_group)

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages, and return it. All ranks must call it.

        Args:
            max_norm: 0 clips nothing.
        """
        by_mesh: dict[Any, list[nn.Parameter]] = {}  # torch (2.13) mixes no tensors of several meshes
        for each in self._model.parameters():
            if each.grad is not None:
                by_mesh.setdefault(each.grad.device_mesh if isinstance(each.grad, DTensor) else None, []).append(each)
        uncounted = None if self._counts_tied else self._tied()
        counted = [[each.grad for each in trained if each is not uncounted] for trained in by_mesh.values()]
        square = torch.zeros((), device=next(self._model.parameters()).device)
        for of_mesh in counted:
            square += _square([each for each in of_mesh if each is not None])
        torch.distributed.all_reduce(square, group=self._stages_group)
        norm = square.sqrt()
        for trained in by_mesh.values() if max_norm > 0 else ():
            clip_grads_with_norm_(trained, max_norm, norm)
        return norm


def _square(gradients: list[Tensor]) -> Tensor:
    """The square of the norm of gradients of one mesh, those on other ranks of it included."""
    norm = get_total_norm(gradients)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
