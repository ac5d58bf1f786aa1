"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
    assert "SIGTERM: a checkpoint is saved after this step, then the run ends; Ctrl-C ends it at once\n" in said
    assert said.endswith("asked: True\n")
