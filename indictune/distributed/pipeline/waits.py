"""How long a rank computes in a training step, and how long it waits for other stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = float | torch.Event


class Waits:
    """Measures the share of the last step in which a rank did not compute. Reads a clock that the GPU keeps.

    Args:
        device: of the rank.
    """

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
