"""A run that is started by its command: how it ended, and why."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from indictune import stop_signals
from indictune.supervise.run_folder import CONSOLE, RunEnd, run_in_folder

KILLED = "import os, pathlib; pathlib.Path(os.environ['COUNTS']).write_text('oom_kill 1'); os.kill(os.getpid(), 9)"
REPORTS = """
import json, os, pathlib, sys
pathlib.Path(os.environ['INDICTUNE_STATUS_FILE']).write_text(json.dumps({'state': 'user_error', 'message': 'no rows'}))
sys.exit(1)
"""
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print('waiting', flush=True)
time.sleep(30)
"""


def ended(folder: Path, program: str, **variables: str) -> RunEnd:
    return run_in_folder([sys.executable, "-c", program], folder / "run", variables)


def test_a_run_that_ends_well_has_its_console_in_a_file(tmp_path: Path) -> None:
    for _ in range(2):  # what a resumed run says is added
        assert ended(tmp_path, "print('trained')").state == "ok"
    assert (tmp_path / "run" / CONSOLE).read_text(encoding="utf-8") == "trained\ntrained\n"


@pytest.mark.parametrize(
    ("program", "state", "message"),
    [
        (REPORTS, "user_error", "no rows"),  # which launchers turn into exit code 1
        ("print('so'); raise SystemExit(3)", "failed", "exit code 3: so"),
        ("raise SystemExit(2)", "user_error", "exit code 2: it said nothing"),
    ],
)
def test_why_a_run_did_not_end_well(tmp_path: Path, program: str, state: str, message: str) -> None:
    end = ended(tmp_path, program)
    assert (end.state, end.message) == (state, message)


def test_a_run_that_the_kernel_kills_for_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "counts"
    counts.write_text("oom_kill 0", encoding="ascii")
    monkeypatch.setattr(stop_signals, "COUNTS", counts)
    end = ended(tmp_path, KILLED, COUNTS=str(counts))
    assert end.state == "failed"
    assert "memory" in end.message


def test_a_run_that_is_enough_is_asked_to_stop_once(tmp_path: Path) -> None:
    said = tmp_path / "run" / CONSOLE
    command = [sys.executable, "-c", WAITS]
    began = time.monotonic()
    end = run_in_folder(command, tmp_path / "run", {}, lambda: "waiting" in said.read_text(encoding="utf-8"))
    assert end.state == "resumable"
    assert time.monotonic() - began < 20
