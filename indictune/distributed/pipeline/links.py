"""Send tensors between neighbouring stages without waiting for the receiver."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

Direction = tuple[int, int]  # ranks in the pipeline: sender, receiver


class Links:
    """The links of one rank to its neighbours in a ring of stages.

    Each direction of each link, for states and for gradients, is a group of its own. NCCL runs the messages of one
    group in order: two neighbours that both send first would wait for each other.

    Args:
        pipelines: the ranks of each pipeline of the run, by stage. All ranks must pass the same.
        is_ring: whether the last rank also sends to the first.
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
