"""The first micro-batch, computed in vain before the first step, where ranks lay out by it what they send."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from indictune.checkpoint.rng_state import RandomStates
from indictune.distributed.communication import passes_until_laid_out, sending
from indictune.train.task_trainer import TaskTrainer


def rehearse(trainer: TaskTrainer, model: nn.Module, step: Callable[[], object]) -> None:
    """Lay out what ranks send as it will be laid out later (`communication.passes_until_laid_out`).

    Else a run that goes on would add the gradients of its first steps in another order than one that was not stopped.

    Args:
        trainer: of the run; what it draws and counts is as it was before.
        model: as it is distributed.
        step: the forward and backward pass of a micro-batch. After the first call nothing is done.
    """
    if trainer.has_begun:
        return
    trainer.has_begun = True
    passes = passes_until_laid_out(model)
    if passes == 0:
        return
    states, unlogged = RandomStates(), copy.deepcopy(trainer.unlogged())
    with sending(model):
        for _ in range(passes):
            step()
    model.zero_grad()
    states.restore()
    trainer.log_on(unlogged)
