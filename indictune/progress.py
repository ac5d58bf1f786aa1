"""How far this process is, so that a rank that holds up the others can be named."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Each = TypeVar("Each")

LAST_BEFORE_A_WAIT = "a backward pass"  # in which a rank waits for the gradients of the others


class Progress:
    """Counts the places that all ranks pass in the same order, above all those after which they wait for each other.

    When nothing moves any more, all others wait for the rank with the lowest count.

    Attributes:
        step: the last training step that ended.
        count: of the places passed so far.
        place: the last one.
    """

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.place = "the start"
        self._last = time.monotonic()

    def passed(self, place: str) -> None:
        """Note that this rank arrived at a place."""
        self.count += 1
        self.place = place
        self._last = time.monotonic()

    def passing(self, place: str, items: Iterable[Each]) -> Iterator[Each]:
        """Yield the items, and note with each that this rank arrived at a place."""
        for each in items:
            self.passed(place)
            yield each

    def moved(self) -> None:
        """Note that this rank works where it is."""
        self._last = time.monotonic()

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """A block in which this rank waits for the work of another one, which is thus behind it."""
        before = self.place
        self.passed(place)
        try:
            yield
        finally:
            self.count -= 1
            self.place = before
            self._last = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds since this rank moved."""
        return time.monotonic() - self._last


OWN_PROGRESS = Progress()
"""The progress of this process. Code that prepares rows or reads weights knows no run."""
