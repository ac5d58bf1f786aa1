"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from indictune.stop_signals import StopRequest
from tests.ranks.launching import ROOT

SPEAK = """
import logging, time
from indictune.supervise.run_folder import ConsoleHandler
from indictune.stop_signals import StopRequest
logger = logging.getLogger("indictune")
logger.setLevel(logging.INFO)
logger.addHandler(ConsoleHandler(open(2, "w", buffering=1)))
request = StopRequest()
with request.listening():
    request.wait_for_the_step()
    logger.info("x" * 1_000_000)
    deadline = time.monotonic() + 9
    while not request.asked and time.monotonic() < deadline:  # another thread receives it
        time.sleep(0.01)
    logger.info("asked: %s", request.asked)
"""


def test_a_signal_may_come_while_a_message_waits_for_a_halted_console() -> None:
    with subprocess.Popen([sys.executable, "-c", SPEAK], cwd=ROOT, stderr=subprocess.PIPE) as speaking:
        assert speaking.stderr is not None
        os.read(speaking.stderr.fileno(), 1)  # the rest does not fit into the pipe
        speaking.send_signal(signal.SIGTERM)
        said = speaking.stderr.read().decode()
    assert speaking.returncode == 0, said.strip("x")
    assert said.count("x") == 999_999
    assert "SIGTERM: the run stops as soon as it can" in said
    assert "asked: True\n" in said


END = """
import os, signal, sys
from indictune.stop_signals import StopRequest
request = StopRequest()
with request.listening():
    request.ignore()
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sys.exit(75)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", -signal.SIGINT)])
def test_a_finished_run_keeps_its_exit_code_while_its_process_ends(name: str, code: int) -> None:
    """Although its scheduler repeats the signal; Ctrl-C ends a process that hangs."""
    assert subprocess.run([sys.executable, "-c", END, name], cwd=ROOT, check=False).returncode == code


READ_AHEAD = """
import os, signal, sys
from torch.utils.data import DataLoader
from indictune.stop_signals import SIGNALS, SignalIgnoringContext

def as_from_a_scheduler(worker):
    # torch's handler is there, the worker's first row is not.
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

context = SignalIgnoringContext() if sys.argv[2] == "deaf" else None
rows = DataLoader(range(8), num_workers=2, worker_init_fn=as_from_a_scheduler, multiprocessing_context=context)
print([int(row) for row in rows])
print("blocked here:", signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def read_ahead(name: str, workers: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READ_AHEAD, name, workers]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.more) for name in ("SIGUSR1", "SIGINT"))]
)
def test_a_worker_that_reads_rows_ahead_ignores_signals(name: str) -> None:
    read = read_ahead(name, "deaf")
    assert read.returncode == 0, read.stderr
    assert read.stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\nblocked here: set()\n"


@pytest.mark.more
def test_upstream_workers_die_of_a_signal_and_the_run_with_them() -> None:
    """Without `SignalIgnoringContext` (torch 2.13)."""
    read = read_ahead("SIGTERM", "torch's")
    assert read.returncode == 1
    assert "exited unexpectedly" in read.stderr


def test_a_signal_says_how_long_a_step_takes() -> None:
    for seconds, said in ((0.4, "losing a step; "), (75.2, "losing a step (a step takes 75 s); ")):
        request, (reader, writer) = StopRequest(), os.pipe()
        request.report_to, request.step_seconds, request._wait = [writer], seconds, True
        request._handle(signal.SIGTERM, None)
        os.close(writer)
        with open(reader, encoding="utf-8") as report:
            assert said in report.read()


ASK_AGAIN = """
import os, signal
from indictune.stop_signals import StopRequest
request = StopRequest()
with request.listening():
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        os.kill(os.getpid(), signal.SIGUSR1)
        print("cleared away")
"""


def test_a_repeated_signal_does_not_disturb_the_clearing_up() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK_AGAIN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.stdout == "cleared away\n"
    assert "During handling" not in asked.stderr


ASK = """
import sys, threading, time
from indictune.stop_signals import StopRequest
request = StopRequest()
with request.listening():
    if sys.argv[1] == "later":
        request.wait_for_the_step()
    threading.Thread(target=request.ask).start()
    time.sleep(1)
    print("asked:", request.asked)
"""


@pytest.mark.more
def test_ask_ends_the_run_before_its_first_step_only() -> None:
    at_once, later = (
        subprocess.run([sys.executable, "-c", ASK, word], cwd=ROOT, capture_output=True, text=True, check=False)
        for word in ("at once", "later")
    )
    assert at_once.stdout == ""
    assert "StoppedBeforeFirstStep: stopped by SIGTERM" in at_once.stderr
    assert later.stdout == "asked: False\n", later.stderr


START = """
import signal, subprocess, sys, time
from indictune.stop_signals import StopRequest
request = StopRequest()
with request.listening():
    request.wait_for_the_step()
    subprocess.run(["sh", "-c", f"(kill -{sys.argv[1]} 0; echo done); echo done"], check=True)
    deadline = time.monotonic() + 9
    while not request.asked and time.monotonic() < deadline:  # another thread receives it
        time.sleep(0.01)
    print("asked:", request.asked, flush=True)
subprocess.run(["sh", "-c", "kill -TERM $$"], check=True)
"""


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_to_all_processes_kills_no_program_of_the_step(name: str) -> None:
    command = [sys.executable, "-c", START, name]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, start_new_session=True, check=False)
    assert run.stdout == "done\ndone\nasked: True\n", run.stderr
    assert "died with <Signals.SIGTERM: 15>" in run.stderr  # and one that is started after the run


COMPILE = """
import signal, sys, torch
from indictune.stop_signals import StopRequest
request = StopRequest()
with request.listening():
    if sys.argv[1] == "deaf":
        request.wait_for_the_step()
    else:
        signal.signal(signal.SIGTERM, lambda *_: None)
    print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(2)).tolist(), request.asked)
"""


def compiled(folder: Path, programs: str) -> subprocess.CompletedProcess[str]:
    """Compile a function; each start of the compiler sends SIGTERM to all processes."""
    compiler = folder / "g++"
    compiler.write_text('#!/bin/bash\nkill -TERM 0\nexec g++ "$@"\n', encoding="utf-8")
    compiler.chmod(0o755)
    variables = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", COMPILE, programs]
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, start_new_session=True, check=False
    )


@pytest.mark.slow
def test_a_signal_does_not_break_a_compilation(tmp_path: Path) -> None:
    run = compiled(tmp_path, "deaf")
    assert run.stdout == "[1.0, 1.0] True\n", run.stderr


@pytest.mark.slow
def test_upstream_compilers_die_of_a_signal_and_the_step_with_them(tmp_path: Path) -> None:
    """Where the main thread does not block SIGTERM (torch 2.13)."""
    run = compiled(tmp_path, "torch's")
    assert run.returncode == 1
    assert "No working C++ compiler found" in run.stderr


# As ninja does: each program has its own process group, which a signal to another group does not reach.
BUILD = """
import subprocess, sys
from indictune.stop_signals import StopRequest
with StopRequest().listening():
    subprocess.run(["sh", "-c", f"setsid -w sh -c 'echo $$ > {sys.argv[1]}; sleep 600'; true"], check=True)
"""


def test_a_run_stopped_before_its_first_step_leaves_no_program_behind(tmp_path: Path) -> None:
    number = tmp_path / "number"
    with subprocess.Popen([sys.executable, "-c", BUILD, str(number)], cwd=ROOT, stderr=subprocess.PIPE) as run:
        deadline = time.monotonic() + 60
        while not (number.exists() and number.read_text(encoding="utf-8")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        built = psutil.Process(int(number.read_text(encoding="utf-8")))
        try:
            run.send_signal(signal.SIGTERM)
            assert b"StoppedBeforeFirstStep: stopped by SIGTERM" in run.communicate(timeout=20)[1]
            built.wait(5)
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in (*built.children(), built):
                    each.kill()


# Like torch's compilers, for which torch waits when the process ends.
WAIT = """
import atexit, subprocess, sys
from indictune.config.arguments import IndicTrainingArguments, ModelArguments
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute

def main(session):
    session.stop_request.wait_for_the_step()
    program = subprocess.Popen(["sh", "-c", "sleep 600; true"])
    session.show(str(program.pid))
    atexit.register(program.wait, 300)
    program.wait()

sys.exit(execute(main, read_recipe(["--output_dir", sys.argv[1]], (ModelArguments, IndicTrainingArguments))))
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_and_its_programs_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAIT, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        program = psutil.Process(int(run.stdout.readline()))
        try:
            run.send_signal(signal.SIGINT)
            while "Ctrl-C stops it at once" not in run.stderr.readline():
                pass
            run.send_signal(signal.SIGINT)
            said = run.communicate(timeout=20)[1]
            program.wait(5)
        finally:
            for each in [*program.children(), program] if program.is_running() else []:
                each.kill()
    assert run.returncode == 75
    assert "indictune: interrupted before it could save." in said


AT_ONCE = """
import subprocess, sys
from indictune.config.arguments import IndicTrainingArguments, ModelArguments
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute

def main(session):
    program = subprocess.Popen(["sh", "-c", "sleep 600; true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    session.show(str(program.pid))
    session.end("a rank is gone")

sys.exit(execute(main, read_recipe(["--output_dir", sys.argv[1]], (ModelArguments, IndicTrainingArguments))))
"""


@pytest.mark.more
def test_a_run_ended_by_its_watchdog_leaves_no_program_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_ONCE, str(tmp_path / "out")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    program = int(run.stdout)
    is_left = psutil.pid_exists(program) and psutil.Process(program).status() != psutil.STATUS_ZOMBIE
    if is_left:
        for each in (*psutil.Process(program).children(), psutil.Process(program)):
            each.kill()
    assert (run.returncode, is_left) == (1, False)
    assert run.stderr.endswith("indictune: a rank is gone\n")
