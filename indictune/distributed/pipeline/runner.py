"""Run micro-batches of any shape through the stages of a pipeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from indictune.distributed.pipeline.layout import Action, actions
from indictune.distributed.pipeline.stages import Stages
from indictune.run import LAST_BEFORE_A_WAIT, OWN_PROGRESS

Direction = tuple[int, int]  # ranks in the pipeline: sender, receiver


class StageLinks:
    """The links of one rank to its neighbours in a ring of stages.

    Each direction of each link, for states and for gradients, is a group of its own. NCCL runs the messages of one
    group in order: two neighbours that both send first would wait for each other. All ranks must pass the ranks of all
    pipelines of the run, by stage. In a ring, the last one also sends to the first.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], is_ring: bool) -> None:
        self._groups: dict[tuple[bool, Direction], ProcessGroup] = {}
        self._global = list[int]()
        self._sent: deque[tuple[Work, Tensor]] = deque()
        me = torch.distributed.get_rank()
        for pipeline in pipelines:
            last = len(pipeline) - 1
            pairs = [(here, here + 1) for here in range(last)] + ([(last, 0)] if is_ring else [])
            for pair in pairs:
                for is_forward, direction in ((True, pair), (False, pair[::-1])):
                    group = torch.distributed.new_group([pipeline[each] for each in direction])
                    if me in pipeline:
                        self._groups[is_forward, (direction[0], direction[1])] = group
            if me in pipeline:
                self._global = list(pipeline)

    def send(self, tensor: Tensor, is_forward: bool, direction: Direction) -> None:
        """Begin to send a tensor, and keep it until it is sent."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        tensor = tensor.contiguous()
        work = torch.distributed.isend(tensor, self._global[direction[1]], self._groups[is_forward, direction])
        assert work is not None
        self._sent.append((work, tensor))

    def receive(self, into: Tensor, is_forward: bool, direction: Direction) -> Work:
        """Begin to receive a tensor. Messages of one direction arrive in the order in which they were sent."""
        work = torch.distributed.irecv(into, self._global[direction[0]], self._groups[is_forward, direction])
        assert work is not None
        return work

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._sent.popleft()[0].wait()


Mark = float | torch.Event


class IdleTime:
    """Measures the share of the last step in which a rank did not compute. Reads a clock that the GPU keeps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = [self._mark(), self._mark()]
        self._passes = list[tuple[Mark, Mark]]()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block with the passes of a step."""
        self._passes.clear()
        begin = self._mark()
        yield
        self._step = [begin, self._mark()]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A block with one pass."""
        begin = self._mark()
        yield
        self._passes.append((begin, self._mark()))

    def share(self) -> float:
        """The share of the last step that passed without a pass. Waits for the GPU."""
        whole = self._seconds(*self._step)
        return 1 - sum(self._seconds(*each) for each in self._passes) / whole if whole else 0.0

    def _mark(self) -> Mark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Mark, end: Mark) -> float:
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        end.synchronize()
        return begin.elapsed_time(end) / 1000


Batch = dict[str, Any]
T = TypeVar("T")


@dataclass
class Runner:
    """One rank's part of a pipeline. Every rank has the micro-batches whole, so that it knows all shapes.

    `torch.distributed.pipelining` wants one shape for all micro-batches: the rows of a step would be padded to the
    longest. docs/design.md has the measured times.

    Attributes:
        autocast: what a stage computes in that is not the last; the model itself does so in the last.
        waits: measures the passes.
        before_backward: called with whether the next backward pass is the last one of a step; or None.
    """

    stages: Stages
    links: StageLinks
    schedule: str
    autocast: Callable[[], AbstractContextManager[None]]
    waits: IdleTime
    before_backward: Callable[[bool], None] | None = None

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
        order = actions(self.schedule, self.stages.rank, self.stages.ranks, len(batches))
        waiting: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        total: Tensor | None = None
        with self.waits.step():
            ahead = [self._receive(order[0], batches)]
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
        self.links.finish()
        self.stages.show_all()
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
        here, other = self.stages.rank, self.stages.rank + (1 if action.is_forward else -1)
        self.links.send(tensor, action.is_forward, (here, other % self.stages.ranks))

    def _receive(self, action: Action, batches: Sequence[Batch]) -> tuple[Tensor, Work] | None:
        """Begin to receive what an action needs from another rank; None if it needs nothing."""
        needs = action.stage > 0 if action.is_forward else self.stages.has_next(action.stage)
        if not needs:
            return None
        rows = batches[action.micro_batch]["input_ids"]
        into = torch.empty(*rows.shape, self.stages.width, dtype=self.stages.dtype, device=rows.device)
        here, other = self.stages.rank, self.stages.rank + (-1 if action.is_forward else 1)
        return into, self.links.receive(into, action.is_forward, (other % self.stages.ranks, here))

    def _arrived(self, message: tuple[Tensor, Work] | None) -> Tensor | None:
        if message is None:
            return None
        tensor, work = message
        work.wait()
        return tensor
