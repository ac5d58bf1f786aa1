"""End a process when its launcher dies."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

SECONDS_BETWEEN_LOOKS = 0.5
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


@functools.cache
def end_with_launcher() -> None:
    """Ask the kernel for a SIGTERM when the launcher dies. Only the first call has an effect.

    `accelerate launch` with one process (1.15) dies of a SIGTERM and leaves its child running. So does `deepspeed`
    (0.19), which starts the ranks by another process. Linux alone can help, and only from this call on.
    """
    if sys.platform == "linux" and ("LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ):
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != launcher:  # it died in between
            os.kill(os.getpid(), signal.SIGTERM)
        for ancestor in _launchers_of_launchers(sys.argv[0]):
            threading.Thread(target=_end_with, args=(ancestor,), daemon=True).start()


def _launchers_of_launchers(script: str) -> list[psutil.Process]:
    """The ancestors of the parent that have the script among their arguments: a shell has not."""
    import psutil  # slow, and the parent can die meanwhile

    with suppress(psutil.Error):  # of another user, or gone
        return [each for each in psutil.Process().parents()[1:] if script in each.cmdline()]
    return []


def _end_with(launcher: psutil.Process) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
