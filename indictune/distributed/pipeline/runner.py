"""Run micro-batches of any shape through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from indictune.distributed.pipeline.links import Links
from indictune.distributed.pipeline.schedule import Action, actions
from indictune.distributed.pipeline.stages import Stages
from indictune.distributed.pipeline.waits import Waits
from indictune.progress import LAST_BEFORE_A_WAIT, OWN_PROGRESS

Batch = dict[str, Any]
T = TypeVar("T")


class Runner:
    """One rank's part of a pipeline. Every rank has the micro-batches whole, so that it knows all shapes.

    `torch.distributed.pipelining` wants one shape for all micro-batches: the rows of a step would be padded to the
    longest. docs/design.md has the measured times.

    Args:
        stages: of this rank.
        links: to its neighbours.
        rank: in the pipeline.
        ranks: of the pipeline.
        schedule: of `SCHEDULES`.
        autocast: what a stage computes in that is not the last; the model itself does so in the last.
        waits: measures the passes.
        before_backward: called with whether the next backward pass is the last one of a step; or None.
    """

    def __init__(
        self,
        stages: Stages,
        links: Links,
        rank: int,
        ranks: int,
        schedule: str,
        autocast: Callable[[], AbstractContextManager[None]],
        waits: Waits,
        before_backward: Callable[[bool], None] | None = None,
    ) -> None:
        self.stages, self.links, self.rank, self.ranks, self.schedule = stages, links, rank, ranks, schedule
        self.autocast, self.waits, self.before_backward = autocast, waits, before_backward

    def train(
        self, batches: Sequence[Batch], loss: Callable[[Batch], Tensor], backward: Callable[[Tensor], None]
    ) -> Tensor | None:
        """The forward and backward passes of a step's micro-batches.

        Args:
            batches: the inputs of the whole model and `labels`; `input_ids` are [rows, tokens].
            loss: of a micro-batch, a scalar; called on the last rank only, where the model computes the last stage.
            backward: of that loss.

        Returns:
            The summed loss on the last rank, None on the others.
        """
        with self.waits.step():
            total = self._passes(batches, loss, backward)
        self.links.finish()
        self.stages.show_all()
        return total

    def _passes(
        self, batches: Sequence[Batch], loss: Callable[[Batch], Tensor], backward: Callable[[Tensor], None]
    ) -> Tensor | None:
        order = actions(self.schedule, self.rank, self.ranks, len(batches))
        ahead = [self._receive(order[0], batches)]
        waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        total: Tensor | None = None
        for action, following in zip(order, [*order[1:], None], strict=True):
            if following is not None:  # a message may arrive while this rank computes
                ahead.append(self._receive(following, batches))
            received, key = self._arrived(ahead.pop(0)), action[1:]
            if action.is_forward:
                result = self._forward(action, received, batches[action.micro_batch], loss)
                waiting[key] = received, result
                if not self.stages.has_next(action.stage):
                    total = result.detach() if total is None else total + result.detach()
            else:
                if self.before_backward is not None:
                    self.before_backward(following is None)
                self._backward(action, received, *waiting.pop(key), backward)
        return total

    @torch.no_grad()
    def measure(self, batch: Batch, measure: Callable[[Batch], T]) -> T | None:
        """What `measure` finds in a batch on the last rank, where the model computes the last stage; else None."""
        self.links.finish()  # the batch before; so this rank is at most one batch ahead of the next
        found = None
        for stage in self.stages.numbers:
            forward = Action(True, stage, 0)
            received = self._arrived(self._receive(forward, [batch]))
            if self.stages.has_next(stage):
                with self.autocast():
                    states = self.stages.states(stage, received, batch)
                self._send(states, forward)
            else:
                self.stages.show(stage, received)
                found = measure(batch)
        self.stages.show_all()
        return found

    def _forward(
        self, action: Action, received: Tensor | None, batch: Batch, loss: Callable[[Batch], Tensor]
    ) -> Tensor:
        if received is not None:
            received.requires_grad_()
        if not self.stages.has_next(action.stage):
            self.stages.show(action.stage, received)
            with self.waits.computing():
                return loss(batch)
        OWN_PROGRESS.passed(LAST_BEFORE_A_WAIT)
        with self.waits.computing(), self.autocast():
            states = self.stages.states(action.stage, received, batch)
        self._send(states.detach(), action)
        return states

    def _backward(
        self,
        action: Action,
        gradient: Tensor | None,
        received: Tensor | None,
        result: Tensor,
        backward: Callable[[Tensor], None],
    ) -> None:
        with self.waits.computing():
            if gradient is None:
                backward(result)
            elif result.requires_grad:  # not if all weights up to here are frozen
                torch.autograd.backward(result, gradient)
        if received is not None:
            self._send(torch.zeros_like(received) if received.grad is None else received.grad, action)

    def _send(self, tensor: Tensor, action: Action) -> None:
        other = self.rank + (1 if action.is_forward else -1)
        self.links.send(tensor, action.is_forward, (self.rank, other % self.ranks))

    def _receive(self, action: Action, batches: Sequence[Batch]) -> tuple[Tensor, Work] | None:
        """Begin to receive what an action needs from another rank; None if it needs nothing."""
        needs = action.stage > 0 if action.is_forward else self.stages.has_next(action.stage)
        if not needs:
            return None
        rows = batches[action.micro_batch]["input_ids"]
        into = torch.empty(*rows.shape, self.stages.width, dtype=self.stages.dtype, device=rows.device)
        other = self.rank + (-1 if action.is_forward else 1)
        return into, self.links.receive(into, action.is_forward, (other % self.ranks, self.rank))

    def _arrived(self, message: tuple[Tensor, Work] | None) -> Tensor | None:
        if message is None:
            return None
        tensor, work = message
        work.wait()
        return tensor
