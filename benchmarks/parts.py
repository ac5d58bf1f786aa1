"""Parts of a long benchmark: each in a process of its own, with a limit of time, its findings told as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LAST_LINES = 20

Note = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """What a part is told.

    Attributes:
        size: `full` or `tiny`.
        folder: for models and rows, shared by all parts.
        trace: file (`.json.gz`) for what the profiler sees.
        full_length: whether LLaMA's rows are as long as they may be, not as real ones are.
        start: of the part, by `time.time()`.
        deadline: at which it is stopped.
    """

    size: str
    folder: Path
    trace: Path
    full_length: bool
    start: float
    deadline: float

    def left(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.time()


Part = Callable[[Plan, Note], None]


def run_part(part: Part, plan: Plan, note: Note) -> None:
    """Run a part to its end or its deadline. Whatever it started ends with it, and the GPU is free again.

    Args:
        part: importable by name.
        plan: of the part.
        note: gets each finding when it comes, and `error`, the last lines of what went wrong.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(part, plan, theirs))
    process.start()
    theirs.close()
    told = False
    try:
        while ours.poll(max(0.0, plan.left())):
            finding = ours.recv()
            told = told or "error" in finding
            note(finding)
        note({"error": f"It was stopped after {plan.deadline - plan.start:.0f} s, its share of the time."})
    except EOFError:
        process.join()
        if process.exitcode and not told:
            note({"error": f"It ended with the exit code {process.exitcode}."})
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _live(part: Part, plan: Plan, connection: Connection) -> None:
    os.setsid()  # so that all that it starts can be ended with it
    try:
        part(plan, connection.send)
    except Exception:
        connection.send({"error": last_lines(traceback.format_exc())})
        raise


def last_lines(text: str) -> str:
    """Enough of an error to tell what it was."""
    return "\n".join(line[:300] for line in text.strip().splitlines()[-LAST_LINES:])
