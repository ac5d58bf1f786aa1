"""Parts of a long benchmark: each runs in its own process with a time limit and reports findings as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from indictune.console_text import table

LAST_LINES = 20

Note = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """The input of a part.

    Attributes:
        size: `full` or `tiny`.
        folder: for models and rows, shared by all parts.
        deadline: `time.time()` at which it is stopped.
    """

    size: str
    folder: Path
    deadline: float


Part = Callable[[Plan, Note], None]


def run_part(part: Part, plan: Plan, note: Note) -> None:
    """Run a part to its end or its deadline; kill all that it started, so that the GPU is free again.

    Args:
        part: importable by name.
        plan: of the part.
        note: takes each finding when it comes, and `error`, the last lines of an exception.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_live, args=(part, plan, theirs))
    process.start()
    theirs.close()
    failed = False
    try:
        while ours.poll(max(0.0, plan.deadline - time.time())):
            finding = ours.recv()
            failed = failed or "error" in finding
            note(finding)
        note({"error": "It was stopped at its time limit."})
    except EOFError:
        process.join()
        if process.exitcode and not failed:
            note({"error": f"It ended with exit code {process.exitcode}."})
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _live(part: Part, plan: Plan, connection: Connection) -> None:
    os.setsid()  # one process group for all that it starts
    try:
        part(plan, connection.send)
    except Exception:
        connection.send({"error": last_lines(traceback.format_exc())})
        raise


def last_lines(text: str) -> str:
    """The end of an error message."""
    return "\n".join(line[:300] for line in text.strip().splitlines()[-LAST_LINES:])


def show(lines: Sequence[dict[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    """Print a table of contenders; `columns` maps a key of a line to its title and format."""
    cells = [[form.format(line[key]) if key in line else "" for key, (_, form) in columns.items()] for line in lines]
    body = [[line["contender"], *row] for line, row in zip(lines, cells, strict=True)]
    print(table(["contender", *(title for title, _ in columns.values())], body), end="\n\n", flush=True)
