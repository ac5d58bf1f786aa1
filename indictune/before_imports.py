"""Importing this answers `--help`, and makes a process ready to be stopped while it imports the rest for seconds.

It blocks the signals that ask a run to stop until the run listens (`stop_signals.let_through`), and sends this process
a SIGTERM when its launcher dies. Ctrl-C is not blocked.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from indictune.config.help import help_of
from indictune.config.read_words import split_flags
from indictune.config.task_names import LAUNCHED_BY, SCRIPTS

_LOOK_EVERY_S = 0.5


def _end_with_launcher(parent: int, script: str) -> None:
    """Wait until the parent dies, or an ancestor that was given the script too, and send a SIGTERM.

    `accelerate launch` with one process (1.15) dies of a SIGTERM and leaves its child running. So does `deepspeed`
    (0.19), which starts the ranks by another process.
    """
    import psutil  # slow

    with suppress(psutil.NoSuchProcess):
        launchers = [psutil.Process(parent)]
        for each in launchers[0].parents():
            with suppress(psutil.Error):  # of another user
                launchers += [each] if script in each.cmdline() else []
        while all(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in launchers):
            time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _answer_help() -> None:
    """Print the help of a script, and end."""
    flags = dict(split_flags(sys.argv[1:]))
    for task, script in SCRIPTS.items():
        if Path(sys.argv[0]).name == script and "help" in flags:
            if os.environ.get("RANK", "0") == "0":
                print(
                    help_of(task, f"usage: python {sys.argv[0]} --config RECIPE.yaml [flags]\n", flags["help"]), end=""
                )
            sys.exit(0)


_answer_help()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
is_launched = os.environ.get(LAUNCHED_BY) == str(os.getppid())  # by `indictune train`
if is_launched or "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
    threading.Thread(target=_end_with_launcher, args=(os.getppid(), sys.argv[0]), daemon=True).start()
