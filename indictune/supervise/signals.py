"""Signals that ask a run to stop: what a scheduler sends before it takes the machine away, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkContext, ForkProcess
from types import FrameType
from typing import Any

import psutil

# SLURM sends SIGTERM, or SIGUSR1 with `--signal=USR1@120`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
EXIT_RESUMABLE = 75


class Stopped(BaseException):
    """The run was asked to stop and has lost nothing: `--resume_from_checkpoint auto` goes on with it.

    No `Exception`: libraries catch those, and the request would be lost.
    """


class NotBegun(Stopped):
    """The run was asked to stop before its first step: where it names a checkpoint, `auto` would take another."""


class StopRequest:
    """Whether this process was asked to stop.

    Before `wait_for_the_step` there is nothing to save, and the signal ends the run at once by `Stopped`.

    Attributes:
        asked: whether a signal has come.
        agreed: whether all ranks know that one of them was asked.
        evaluation_due: whether the last step was to be evaluated, and was not.
        epoch_ends: whether the end of an epoch, or of the training, is to come before another step.
        tells: file descriptors that a signal is told to.
    """

    def __init__(self) -> None:
        self.asked = False
        self.agreed = False
        self.evaluation_due = False
        self.epoch_ends = False
        self.tells: Sequence[int] = (2,)
        self._wait = False
        self._over = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which the signals are handled. Only the main thread can.

        What a scheduler sends stays ignored after it where it is ignored by then: it may come again while the process
        ends, and would take its exit code away.
        """
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        starts = subprocess.Popen
        try:
            yield
        finally:
            subprocess.Popen = starts  # type: ignore[misc]
            for number, handler in before.items():
                if number == signal.SIGINT or not self._over:
                    signal.signal(number, handler)

    def wait_for_the_step(self) -> None:
        """From now on a signal is only noted: whoever trains looks at `asked`, and raises `Stopped` after saving.

        Programs that are started from now on, such as a compiler that a step needs, leave the signals to the run.
        """
        self._wait = True
        if signal.getsignal(signal.SIGTERM) == self._handle:  # it is put back where `listening` ends
            subprocess.Popen = _DeafProgram  # type: ignore[misc]
        if self.asked:
            raise NotBegun("stopped before there was anything to save.")

    def ask(self) -> None:
        """Ask this process to stop, from any thread, where that ends the run at once."""
        if not self._wait:
            os.kill(os.getpid(), signal.SIGTERM)

    def ignore(self) -> None:
        """From now on a signal changes nothing: the run is over, and tells how."""
        self._over = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:  # a scheduler may ask again, also while what was begun is cleared away
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.asked = True
        name = signal.Signals(number).name
        if not self._wait:
            end_programs(signal.SIGTERM)
            raise NotBegun(f"stopped by {name} before there was anything to save.")
        self._tell(f"{name}: the run ends as soon as nothing is lost by it; Ctrl-C ends it at once\n")

    def _tell(self, line: str) -> None:
        """Past all loggers: a signal may come while a stream is being written, on a console that has been halted for
        long. To write to that stream too raises "reentrant call inside <_io.BufferedWriter>" (Python 3.11)."""
        for descriptor in self.tells:
            with suppress(OSError):  # a console that is gone
                os.write(descriptor, line.encode())


def let_through() -> None:
    """Let the signals come that `block_stop_signals` has held back, where somebody listens by now.

    Raises:
        Stopped: one has come meanwhile.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def kill_programs() -> None:
    """End at once what this process has started, and what that has. Compilers are deaf, and torch (2.13) would wait
    for them when the process ends, up to 5 minutes (`SubprocPool.shutdown`)."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's (2.13) raises where a process dies that reads rows ahead
    end_programs(signal.SIGKILL)


def end_programs(number: signal.Signals) -> None:
    """Send it to all that this process has started. Python kills a program that it waits for (`subprocess.run`), and
    what that has started would live on: the compilers of `ninja`, for minutes."""
    for program in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            program.send_signal(number)


@contextmanager
def _held_back() -> Iterator[None]:
    """A block in which processes are started with the signals blocked: they take that over before they run a line, and
    so does what they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _DeafProgram(subprocess.Popen[Any]):
    """A program that leaves the signals to the run.

    torchrun sends SIGTERM to all processes of a rank, and a terminal so sends Ctrl-C. The compilers that
    `--torch_compile` (torch 2.13) starts within a step would die of it, and the step with them.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        with _held_back():
            super().__init__(*args, **settings)


class _Deaf(ForkProcess):
    def start(self) -> None:
        """Start it with the signals held back. A handler would come too late: torch sets its own first, by
        which a SIGTERM ends the process."""
        with _held_back():
            super().start()


class DeafWorkers(ForkContext):
    """Starts processes that leave the signals to the run (`multiprocessing_context` of a loader).

    Where signals are sent to all processes, those that read rows ahead would die of them, and the run of their death.
    """

    Process = _Deaf
