"""A comparison of contenders by turns, against the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contenders import Contender, Job
from benchmarks.parts import last_lines
from benchmarks.speed import Runner

PATIENCE_S = 90.0
SECONDS_TO_FINISH = 5.0


class Race:
    """Contenders that take turns, lap by lap. One that fails is out, and the others go on.

    Args:
        target: the life of a contender's process.
        start: by `time.time()`; two thirds of the time are for starting, the rest is for laps alone.
        deadline: when all must be over.

    Attributes:
        laps: seconds of each contender's laps, the first of each left out.
        errors: of those that are out.
        seconds_to_ready: from the start of each process to where training begins.
    """

    def __init__(self, target: Callable[[Contender, Job, Connection], None], start: float, deadline: float) -> None:
        self.target = target
        self.last_start = start + (deadline - start) * 2 / 3
        self.deadline = deadline
        self.laps: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}
        self.seconds_to_ready: dict[str, float] = {}
        self._runners: dict[str, Runner] = {}

    def _enter(self, contender: Contender, job: Job) -> None:
        if time.time() > self.last_start:
            self.errors[contender.title] = "No time was left to start it."
            return
        try:
            runner = Runner(contender, job, self.target, PATIENCE_S)
        except RuntimeError as error:
            self.errors[contender.title] = last_lines(str(error))
            return
        self._runners[contender.title] = runner
        self.seconds_to_ready[contender.title] = runner.seconds_to_ready
        self.laps[contender.title] = []

    def enter_all(self, entries: Sequence[tuple[Contender, Job]], together: bool) -> None:
        """Start contenders one after the other, or side by side where the time of starting is not looked at."""
        with ThreadPoolExecutor(len(entries) if together else 1) as pool:
            list(pool.map(lambda entry: self._enter(*entry), entries))

    def run(self, laps: int, after_round: Callable[[], None]) -> None:
        """Rounds of laps until there are `laps`, or the time is over; one more before, which does not count."""
        self._round()
        for seconds in self.laps.values():
            seconds.clear()
        took = 0.0
        for _ in range(laps):
            since = time.time()
            if since + took > self.deadline - SECONDS_TO_FINISH:
                return
            self._round()
            took = time.time() - since
            after_round()

    def finish(self) -> dict[str, dict[str, Any]]:
        """What each contender counted that came to the end."""
        for title in self._runners:
            if not self.laps[title]:
                self.errors[title] = "It had no time for a lap that counts."
        return {title: counted for title in list(self._runners) if (counted := self._try(title, Runner.finish))}

    def _round(self) -> None:
        for title in list(self._runners):
            seconds = self._try(title, Runner.lap)
            if seconds is not None:
                self.laps[title].append(seconds)

    def _try(self, title: str, action: Callable[[Runner], Any]) -> Any:
        try:
            return action(self._runners[title])
        except RuntimeError as error:
            self.errors[title] = last_lines(str(error))
            del self._runners[title]
            return None
