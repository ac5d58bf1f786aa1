"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.distributed.launching import ROOT

SPEAK = """
import logging
from pathlib import Path
from indictune.training.logs import ConsoleHandler
from indictune.training.stopping import StopRequest
logger = logging.getLogger("indictune")
logger.setLevel(logging.INFO)
logger.addHandler(ConsoleHandler(open(2, "w", buffering=1), 0, Path()))
request = StopRequest()
with request.listening():
    request.wait_for_the_step()
    logger.info("x" * 1_000_000)
    logger.info("asked: %s", request.asked)
"""


def test_a_signal_may_come_while_a_message_waits_for_a_console_that_stands_still() -> None:
    with subprocess.Popen([sys.executable, "-c", SPEAK], cwd=ROOT, stderr=subprocess.PIPE) as speaking:
        assert speaking.stderr is not None
        os.read(speaking.stderr.fileno(), 1)  # the rest does not fit into the pipe
        speaking.send_signal(signal.SIGTERM)
        said = speaking.stderr.read().decode()
    assert speaking.returncode == 0, said.strip("x")
    assert said.count("x") == 999_999
    assert "SIGTERM: the run ends as soon as nothing is lost by it; Ctrl-C ends it at once\n" in said
    assert said.endswith("asked: True\n")


END = """
import os, signal, sys
from indictune.training.stopping import StopRequest
request = StopRequest()
with request.listening():
    request.ignore()
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sys.exit(75)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", -signal.SIGINT)])
def test_a_run_that_is_over_keeps_its_exit_code_while_its_process_ends(name: str, code: int) -> None:
    """Whatever its scheduler sends again; Ctrl-C ends what hangs."""
    assert subprocess.run([sys.executable, "-c", END, name], cwd=ROOT, check=False).returncode == code


READ_AHEAD = """
import os, signal, sys
from torch.utils.data import DataLoader
from indictune.training.stopping import SIGNALS, DeafWorkers

def as_from_a_scheduler(worker):
    # torch's handler is there, the worker's first row is not.
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

context = DeafWorkers() if sys.argv[2] == "deaf" else None
rows = DataLoader(range(8), num_workers=2, worker_init_fn=as_from_a_scheduler, multiprocessing_context=context)
print([int(row) for row in rows])
print("blocked here:", signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def read_ahead(name: str, workers: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READ_AHEAD, name, workers]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_new_process_that_reads_rows_ahead_hears_no_signal(name: str) -> None:
    read = read_ahead(name, "deaf")
    assert read.returncode == 0, read.stderr
    assert read.stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\nblocked here: set()\n"


def test_else_it_would_end_and_the_run_with_it() -> None:
    """Without `DeafWorkers` (torch 2.13)."""
    read = read_ahead("SIGTERM", "torch's")
    assert read.returncode == 1
    assert "exited unexpectedly" in read.stderr
