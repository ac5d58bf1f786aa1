"""Importing this answers `--help` and mistakes, and makes a process ready to be stopped during the slow imports.

It blocks the signals that ask a run to stop until the run listens (`unblock_stop_signals`), and sends this process a
SIGTERM when its launcher dies. Ctrl-C is not blocked.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from indictune.config.command_line import (
    LAUNCHED_BY,
    SCRIPTS,
    early_problems,
    flags_of,
    help_of,
    keep_command_line,
    scripts_with,
    unknown_name,
)
from indictune.config.early_values import is_launched, value_problems
from indictune.console_text import printable
from indictune.credentials import holds_token, without_tokens
from indictune.errors import UserError, linked

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


def _answer_help_and_mistakes() -> None:
    """Print the help of a script, or what is wrong with its flags and recipe at first sight, and end.

    Under a launcher, the run reports it, to `status.json` too.
    """
    task = next((task for task, script in SCRIPTS.items() if Path(sys.argv[0]).name == script), None)
    if task is None:
        return
    read = keep_command_line(sys.argv[1:])
    flags = dict(read.flags)
    if "help" in flags:
        if os.environ.get("RANK", "0") == "0":
            print(help_of(task, f"usage: python {sys.argv[0]} --config RECIPE.yaml [flags]\n", flags["help"]), end="")
        sys.exit(0)
    known = [*flags_of(task), "config"]
    flags.pop("", None)  # words that are no flags: the run says more
    problems = [unknown_name(name, "--", known, scripts_with(name)) for name in flags if name not in known]
    problems += early_problems(read, [task]) + value_problems(read, [task])
    if problems and not is_launched() and not any(map(holds_token, sys.argv)):  # of tokens the run says more
        message = printable(without_tokens(f"indictune: {UserError(problems=problems).message}"))
        print(linked(message, sys.stderr), file=sys.stderr)
        sys.exit(2)


_answer_help_and_mistakes()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
if is_launched() or os.environ.get(LAUNCHED_BY) == str(os.getppid()):  # by `indictune train`
    threading.Thread(target=_end_with_launcher, args=(os.getppid(), sys.argv[0]), daemon=True).start()
