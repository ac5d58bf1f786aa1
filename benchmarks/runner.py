"""Child processes that train. The parent lets them run lap by lap."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from benchmarks.contenders import Contender, Job, compete
from benchmarks.timed_parts import last_lines

Target = Callable[[Contender, Job, Connection], None]


class Runner:
    """A contender's process.

    Args:
        contender: that runs.
        job: of all contenders.
        target: what the process does.
        deadline: `time.time()` at which a silent process has failed; None for never.

    Attributes:
        seconds_to_ready: from the start of the process to the start of training.
        counted: its counts after its last lap.

    Raises:
        RuntimeError: it failed; so do the methods.
    """

    def __init__(
        self, contender: Contender, job: Job, target: Target = compete, deadline: float | None = None
    ) -> None:
        since = time.perf_counter()
        context = multiprocessing.get_context("spawn")
        self.log = job.folder / f"{contender.title}.log"
        self.title = contender.title
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.counted: dict[str, Any] = {}
        self.deadline = deadline
        # A daemon could not start loader workers, so this process must end it.
        self.process: BaseProcess = context.Process(target=_live, args=(target, contender, job, theirs))
        self.process.start()
        Finalize(self, self.process.kill, exitpriority=0)
        theirs.close()
        self._receive()  # it is ready
        self.seconds_to_ready = time.perf_counter() - since

    def lap(self) -> float:
        """Let it run a lap; return its seconds."""
        seconds, self.counted = self._ask("go")
        return float(seconds)

    def finish(self) -> dict[str, Any]:
        """Stop training and kill the process; return its counts."""
        counted: dict[str, Any] = self._ask("stop")
        self.end()
        return counted

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()

    def _ask(self, word: str) -> Any:
        try:
            self.connection.send(word)
        except ConnectionError:  # it died between two laps
            raise self._failure() from None
        return self._receive()

    def _receive(self) -> Any:
        try:
            if not self.connection.poll(None if self.deadline is None else max(0.0, self.deadline - time.time())):
                raise RuntimeError(f"{self.title} did not answer in its time.")
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._failure() from None

    def _failure(self) -> RuntimeError:
        """An error with the process's log."""
        log = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return RuntimeError(f"{self.title} failed:\n{log}")


def _live(target: Target, contender: Contender, job: Job, connection: Connection) -> None:
    """Fork further processes, as a script does. A spawned child would spawn its own, which import everything again."""
    multiprocessing.set_start_method(None, force=True)
    target(contender, job, connection)


def run_alone(contender: Contender, job: Job, target: Target = compete) -> dict[str, Any]:
    """Train to the end; return the counts. The job's lap is the whole run."""
    runner = Runner(contender, job, target)
    runner.lap()
    return runner.finish()


@dataclass
class Measured:
    """What one contender did.

    Attributes:
        title: of the contender.
        laps: seconds of its laps, without the first, which warms up.
        counted: its counts after the last lap.
        seconds_to_first_step: from the start of its process.
        error: why it failed, or empty.
    """

    title: str
    laps: list[float] = field(default_factory=list)
    counted: dict[str, Any] = field(default_factory=dict)
    seconds_to_first_step: float = 0.0
    error: str = ""


def measure_each(
    contenders: Sequence[Contender], job: Job, laps: int, deadline: float, target: Target = compete
) -> Iterator[Measured]:
    """Run contenders one after the other, each alone on the device; a failure does not stop the others.

    Args:
        contenders: in order. Each gets an equal share of the time that is left.
        job: of all.
        laps: at most; fewer when a share is used up.
        deadline: by `time.time()`.
        target: what a process does.
    """
    for number, contender in enumerate(contenders):
        now = time.time()
        share_ends = now + (deadline - now) / (len(contenders) - number)
        measured = Measured(contender.title)
        runner = None
        try:
            runner = Runner(contender, job, target, share_ends)
            runner.lap()
            measured.seconds_to_first_step = runner.seconds_to_ready + runner.counted["first_step_s"]
            slowest_s = 0.0
            while len(measured.laps) < laps and (not measured.laps or time.time() + slowest_s < share_ends):
                measured.laps.append(runner.lap())
                slowest_s = max(measured.laps)
        except RuntimeError as error:
            measured.error = last_lines(str(error))
        if runner is not None:
            measured.counted = runner.counted
            runner.end()
        yield measured
