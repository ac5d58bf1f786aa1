"""Start a run by its command, wait for its end, and find out how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from indictune.config.command_line import LAUNCHED_BY, STATUS_FILE
from indictune.files import json_or_nothing
from indictune.stop_signals import killed_processes
from indictune.supervise.run_folder import EXIT_CODES

CONSOLE = "console.log"
_STATUS = ".ended.json"  # of a run that was refused before it had its folder, too
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, as in `status.json`, and why if it is not ok."""

    state: str
    message: str


def run_in_folder(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], is_enough: Callable[[], bool] = lambda: False
) -> RunEnd:
    """Start the command of a run whose `--output_dir` is the folder, and wait. Its console goes to a file there.

    When `is_enough`, which is asked twice a second, the run gets a SIGTERM, by which it saves and ends. The run has a
    session of its own: Ctrl-C reaches only this process, whose handler passes it on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    status, kills, code = folder / _STATUS, killed_processes(), None
    status.unlink(missing_ok=True)
    ours = {LAUNCHED_BY: str(os.getpid()), STATUS_FILE: str(status.absolute())}
    environ, nothing = {**os.environ, **ours, **variables}, subprocess.DEVNULL
    with (folder / CONSOLE).open("ab") as said:
        run = subprocess.Popen(command, 0, None, nothing, said, said, env=environ, start_new_session=True)
    with run:
        while code is None:
            if is_enough():
                run.terminate()
                code = run.wait()
            with suppress(subprocess.TimeoutExpired):
                code = run.wait(_LOOK_EVERY_S)
    if code == 0:
        return RunEnd("ok", "")
    if code == -signal.SIGKILL and killed_processes() > kills:
        return RunEnd("failed", "The kernel killed it for lack of memory.")
    state = next((state for state, number in EXIT_CODES.items() if number == code), "failed")
    lines = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    message = f"exit code {code}: {lines[-1] if lines else 'it said nothing'}"
    known = json_or_nothing(status)
    return RunEnd(known.get("state", state), known.get("message", message))
