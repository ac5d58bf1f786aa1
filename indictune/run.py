"""What a process knows of its run: how far it is, whether it was asked to stop, its recipe, folder and console."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from indictune.console_text import line_start, printable

if TYPE_CHECKING:
    from transformers import Trainer

    from indictune.config.plan import AnyPlan
    from indictune.config.recipe import Recipe

logger = logging.getLogger("indictune")

Each = TypeVar("Each")

LAST_BEFORE_A_WAIT = "a backward pass"  # in which a rank waits for the gradients of the others
# SLURM sends SIGTERM, or SIGUSR1 with `--signal=USR1@120`.
OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
SIGNALS = (*OF_SCHEDULERS, signal.SIGINT)
EXIT_RESUMABLE = 75


class Progress:
    """Counts the places that all ranks pass in the same order, above all those after which they wait for each other.

    When nothing moves any more, all others wait for the rank with the lowest count.
    """

    def __init__(self) -> None:
        self.step = 0  # the last training step that ended
        self.count, self.place = 0, "the start"  # of the places passed so far, and the last one
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


class Stopped(BaseException):
    """The run was asked to stop and lost nothing: `--resume_from_checkpoint auto` resumes it.

    It is no `Exception`, because libraries catch those, and the request would be lost.
    """


class StoppedBeforeFirstStep(Stopped):
    """The run was asked to stop before its first step. If it named a checkpoint, `auto` might take another."""


class StopRequest:
    """Whether this process was asked to stop.

    Before `wait_for_the_step` there is nothing to save, and a signal ends the run at once by `Stopped`.

    Attributes:
        asked: whether a signal came.
        agreed: whether all ranks know that one of them was asked.
        evaluation_due: whether the last step still has to be evaluated.
        epoch_ends: whether the epoch, or the training, ends before another step.
        report_to: file descriptors to which a signal is reported.
    """

    def __init__(self) -> None:
        self.asked = self.agreed = self.evaluation_due = self.epoch_ends = False
        self.report_to: Sequence[int] = (2,)
        self._wait = self._over = False
        self._receiver_ends = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which the signals are handled. Only the main thread can enter it.

        After `ignore`, a scheduler's signals stay ignored when the block ends. A scheduler may repeat them while the
        process ends, and they would change its exit code.
        """
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            self._receiver_ends.set()
            if self._wait:  # `wait_for_the_step` blocked them
                unblock_stop_signals()
            for number, handler in before.items():
                if number == signal.SIGINT or not self._over:
                    signal.signal(number, handler)

    def wait_for_the_step(self) -> None:
        """From now on a signal is only noted: the training loop reads `asked`, saves, and raises `Stopped`.

        An idle thread receives the scheduler's signals from now on. The main thread blocks them, and still runs their
        handler. Programs that the run starts inherit the blocked signals. torchrun and schedulers send SIGTERM to all
        processes of a rank: it would kill the compilers that `--torch_compile` (torch 2.13) starts within a step, and
        the step would fail.
        """
        self._wait = True
        if signal.getsignal(signal.SIGTERM) == self._handle:  # within `listening`
            threading.Thread(target=self._receiver_ends.wait, name="signals", daemon=True).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, OF_SCHEDULERS)
        if self.asked:
            raise StoppedBeforeFirstStep("stopped before there was anything to save.")

    def ask(self) -> None:
        """Ask this process to stop, from any thread, if that ends the run at once."""
        if not self._wait:
            os.kill(os.getpid(), signal.SIGTERM)

    def ignore(self) -> None:
        """From now on a signal changes nothing: the run is over, and reports how it ended."""
        self._over = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Act on the first signal, or note and report it.

        The report bypasses all loggers. A signal may come while a stream is being written, and writing to that stream
        again raises "reentrant call inside <_io.BufferedWriter>" (Python 3.11).
        """
        name = signal.Signals(number).name
        if self.asked:  # a scheduler may repeat its signal while the run clears up
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.asked = True
        if not self._wait:
            signal_programs(signal.SIGTERM)
            raise StoppedBeforeFirstStep(f"stopped by {name} before there was anything to save.")
        line = f"{name}: the run stops as soon as it can without losing a step; Ctrl-C stops it at once\n"
        for descriptor in self.report_to:
            with suppress(OSError):  # a closed console
                os.write(descriptor, f"{line_start(descriptor)}{line}".encode())


def unblock_stop_signals() -> None:
    """Unblock the signals that `before_imports` held back, once a handler is set; `Stopped` if one came meanwhile."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def kill_programs() -> None:
    """Kill at once all processes that this one started, and theirs.

    Compilers block signals, and torch (2.13) would wait for them for up to 5 minutes when the process ends
    (`SubprocPool.shutdown`).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's (2.13) raises when a data loader's process dies
    signal_programs(signal.SIGKILL)


def signal_programs(number: signal.Signals) -> None:
    """Send a signal to all processes that this one started, and theirs.

    Python kills a program that it waits for (`subprocess.run`), but not what that program started: the compilers of
    `ninja` would run on for minutes.
    """
    for program in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            program.send_signal(number)


class _SignalIgnoringProcess(ForkProcess):
    def start(self) -> None:
        """Start it with the signals blocked: its own handler would come too late, since torch sets one first."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SignalIgnoringContext(ForkContext):
    """Starts worker processes that ignore the stop signals (`multiprocessing_context` of a data loader).

    A signal to all processes of a run would kill the workers, and the run would fail with them.
    """

    Process = _SignalIgnoringProcess


class Run:
    """One run in this process.

    Attributes:
        is_named: whether the user named `output_dir`.
        results: stream for results.
        console: stream for messages.
        plan: with all derived values, once the process group is up.
        trainer: once it trains.
    """

    plan: AnyPlan | None = None
    trainer: Trainer | None = None

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe, self.rank = recipe, rank
        self.is_named = bool(recipe.values.get("output_dir"))
        self.output_dir = Path(recipe.values.get("output_dir") or ".")
        self.stop_request = StopRequest()
        self.results, self.console = sys.stdout, sys.stderr

    @property
    def console_values(self) -> dict[str, Any]:
        """Training arguments that follow from the console: a file and a pipe get lines, and no progress bar."""
        from transformers.utils.import_utils import is_in_notebook  # slow to import

        return {} if self.console.isatty() or is_in_notebook() else {"disable_tqdm": True}

    def lock_folder(self) -> None:
        """Keep other runs out of the folder. A supervised run does."""

    def show(self, text: str) -> None:
        """Print a result to standard output, on rank 0."""
        if self.rank == 0:
            print(printable(text), file=self.results, flush=True)

    def show_error(self, text: str) -> None:
        """Print to standard error on any rank, on a line of its own."""
        start = line_start(self.console.fileno()) if self.console.isatty() else ""
        print(f"{start}{printable(text)}", file=self.console, flush=True)

    def warn(self, notes: Iterable[str]) -> None:
        """Warn the user, on the console and in the log."""
        for note in notes:
            logger.warning(note)
