"""A comparison of contenders by turns, against the clock.

The first of a round is the one that others are compared with: of a round that is cut there are ratios then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.contenders import Contender, Job
from benchmarks.parts import last_lines
from benchmarks.speed import PADDED, Runner

ENOUGH_LAPS = 5
PATIENCE_S = 120.0
SECONDS_TO_END = 5.0


class Race:
    """Contenders that take turns, lap by lap. One that fails is out, and the others go on.

    Args:
        target: the life of a contender's process.
        start: by `time.time()`; two thirds of the time are for starting, the rest is for laps alone.
        deadline: when all must be over.
        patience_s: after how many seconds of silence a contender has failed.

    Attributes:
        laps: seconds of each contender's laps, the first of each left out.
        counted: what each contender had counted after its last lap.
        errors: of those that are out.
        seconds_to_ready: from the start of a process to where training begins, of each that was started alone.
    """

    def __init__(
        self,
        target: Callable[[Contender, Job, Connection], None],
        start: float,
        deadline: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.target = target
        self.last_start = start + (deadline - start) * 2 / 3
        self.end = deadline - SECONDS_TO_END
        self.patience_s = patience_s
        self.laps: dict[str, list[float]] = {}
        self.counted: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.seconds_to_ready: dict[str, float] = {}
        self._runners: dict[str, Runner] = {}

    def _patience(self) -> float:
        return max(0.0, min(self.patience_s, self.end - time.time()))

    def _start(self, contender: Contender, job: Job) -> Runner | None:
        if time.time() > self.last_start:
            self.errors[contender.title] = "No time was left to start it."
            return None
        try:
            return Runner(contender, job, self.target, self._patience)
        except RuntimeError as error:
            self.errors[contender.title] = last_lines(str(error))
            return None

    def enter_all(self, entries: Sequence[tuple[Contender, Job]], at_once: int) -> None:
        """Start so many contenders side by side; one where the time of starting is looked at.

        Args:
            entries: in the order of their turns.
            at_once: how many.
        """
        with ThreadPoolExecutor(at_once) as pool:
            runners = list(pool.map(lambda entry: self._start(*entry), entries))
        for (contender, _), runner in zip(entries, runners, strict=True):
            if runner is not None:
                self._runners[contender.title] = runner
                self.laps[contender.title] = []
                if at_once == 1:
                    self.seconds_to_ready[contender.title] = runner.seconds_to_ready

    def run(self, laps: int, after_round: Callable[[], None]) -> None:
        """Rounds of laps until there are `laps`, or the time is over; one more before, which does not count."""
        self._round()
        for seconds in self.laps.values():
            seconds.clear()
        took = 0.0  # the first is begun whatever time is left: half a round tells more than none
        for _ in range(laps):
            since = time.time()
            if since + took > self.end:
                break
            self._round()
            took = time.time() - since
            after_round()
        for runner in self._runners.values():
            runner.process.kill()  # all of them, before one is waited for: those on a GPU take their time to end
        for runner in self._runners.values():
            runner.end()
        for title, seconds in self.laps.items():
            if not seconds and title not in self.errors:
                self.errors[title] = "It had no time for a lap that counts."

    def _round(self) -> None:
        for title, runner in list(self._runners.items()):
            try:
                self.laps[title].append(runner.lap())
                self.counted[title] = runner.counted
            except RuntimeError as error:
                if time.time() > self.end:  # it was the time that failed it; what there is is told before all end
                    return
                self.errors[title] = last_lines(str(error))
                self._runners.pop(title).end()


def tell_whether_padding_is_seen(ours: dict[str, Any], padded: dict[str, Any], speed: str) -> bool | None:
    """Whether padding put back costs ours speed, as it must; None where one of the two has no laps.

    Where it costs nothing the table measures something else than it says, and a warning is printed.

    Args:
        ours: its line of the table.
        padded: the line of the one with the padding.
        speed: the name of it in a line.
    """
    if speed not in ours or speed not in padded:
        return None
    ratio = padded[speed] / ours[speed]
    seen = padded["padding_fraction"] > ours["padding_fraction"] == 0 and ratio <= PADDED
    if not seen:
        shares = [f"{line['contender']} computes {line['padding_fraction']:.1%} of it" for line in (ours, padded)]
        print(f"WARNING: padding is not seen: {', '.join(shares)}, ", end="")
        print(f"at {ratio:.2f} times the speed, not {PADDED} or less.", flush=True)
    return bool(seen)


def tell_few_laps(line: dict[str, Any]) -> None:
    """Print of a line of a table that its median is of few laps, where it is."""
    if line.get("few_laps"):
        print(f"  of {line['laps']} laps alone, where {ENOUGH_LAPS} are enough")
