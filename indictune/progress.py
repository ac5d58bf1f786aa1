"""How far this process has come, so that the rank that holds up the others can be named."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Each = TypeVar("Each")


class Progress:
    """Counts the places that all ranks pass in the same order, those above all after which they wait for each other.

    Where nothing moves any more, the rank with the lowest count is the one that all others wait for.

    Attributes:
        step: of the training, the last that has ended.
        count: of the places passed so far.
        place: the last of them.
        moves: of work between two places that the others may wait for long.
    """

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.place = "the start"
        self.moves = 0
        self._last = time.monotonic()

    def passed(self, place: str) -> None:
        """This rank has come there."""
        self.count += 1
        self.place = place
        self._last = time.monotonic()

    def passing(self, place: str, them: Iterable[Each]) -> Iterator[Each]:
        """Each of them; with each, this rank has come there."""
        for each in them:
            self.passed(place)
            yield each

    def moved(self) -> None:
        """This rank goes on with what it does where it is."""
        self.moves += 1
        self._last = time.monotonic()

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """A block in which this rank waits for what one of the others does: it has come further than that one."""
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
        """Seconds since this rank has moved."""
        return time.monotonic() - self._last


HERE = Progress()
"""Of this process: what prepares rows and reads weights has no other way to the run's watchdog."""
