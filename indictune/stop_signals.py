"""What stops a process: signals of a scheduler or the user, and the kernel when memory is short."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from types import FrameType

import psutil

from indictune.console_text import line_start

# SLURM sends SIGTERM, or SIGUSR1 with `--signal=USR1@120`.
OF_SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
SIGNALS = (*OF_SCHEDULERS, signal.SIGINT)
EXIT_RESUMABLE = 75
COUNTS = Path("/proc/vmstat")


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
        step_seconds: how long the last step took; 0 before it ends.
    """

    def __init__(self) -> None:
        self.asked = self.agreed = self.evaluation_due = self.epoch_ends = False
        self.report_to: Sequence[int] = (2,)
        self.step_seconds = 0.0
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
        steps = f" (a step takes {self.step_seconds:.0f} s)" if self.step_seconds >= 1 else ""
        line = f"{name}: the run stops as soon as it can without losing a step{steps}; Ctrl-C stops it at once\n"
        for descriptor in self.report_to:
            with suppress(OSError):  # a closed console
                os.write(descriptor, f"{line_start(descriptor)}{line}".encode())


def unblock_stop_signals() -> None:
    """Unblock the signals that `before_imports` held back, once a handler is set.

    Raises:
        Stopped: one came meanwhile.
    """
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


def killed_processes() -> int:
    """How many processes Linux has killed for lack of memory since it started, those of control groups included."""
    with suppress(OSError):
        for line in COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


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
