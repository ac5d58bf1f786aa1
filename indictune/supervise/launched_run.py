"""Start a run by its command, wait for its end, and find out how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from indictune.config.command_line import LAUNCHED_BY, STATUS_FILE
from indictune.files import json_or_nothing
from indictune.stop_signals import killed_processes
from indictune.supervise.run_folder import EXIT_CODES, State, status_since

CONSOLE = "console.log"
_STATUS = ".ended.json"  # of a run that was refused before it had its folder, too
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, why if it is not ok, and the seconds that it took."""

    state: State
    message: str
    seconds: float


def run_in_folder(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], is_enough: Callable[[], bool] = lambda: False
) -> RunEnd:
    """Start the command of a run whose `--output_dir` is the folder, and wait. Its console goes to a file there.

    While it runs, `is_enough` is asked twice a second. If it is True, the run gets a SIGTERM, by which it saves and
    ends. The run has a session of its own: Ctrl-C reaches only this process, whose handler passes it on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _STATUS).unlink(missing_ok=True)
    ours = {LAUNCHED_BY: str(os.getpid()), STATUS_FILE: str((folder / _STATUS).absolute())}
    began, kills, is_asked = time.time(), killed_processes(), False
    with (
        (folder / CONSOLE).open("ab") as console,
        subprocess.Popen(
            command,
            env={**os.environ, **ours, **variables},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        ) as launched,
    ):
        while (code := _code_soon(launched)) is None:
            if not is_asked and is_enough():
                is_asked = True
                launched.send_signal(signal.SIGTERM)
    seconds = time.time() - began
    if code == 0:
        return RunEnd("ok", "", seconds)
    status = json_or_nothing(folder / _STATUS) or status_since(folder, began)
    known: dict[int, State] = {number: name for name, number in EXIT_CODES.items()}
    if code == -signal.SIGKILL and killed_processes() > kills:
        return RunEnd("failed", "The kernel killed it for lack of memory.", seconds)
    message = status.get("message") or f"exit code {code}: {_last_line(folder / CONSOLE)}"
    return RunEnd(cast(State, status.get("state")) or known.get(code, "failed"), message, seconds)


def _code_soon(launched: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process if it ends within half a second."""
    try:
        return launched.wait(_LOOK_EVERY_S)
    except subprocess.TimeoutExpired:
        return None


def _last_line(console: Path) -> str:
    said = console.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(said) if line.strip()), "it said nothing")
