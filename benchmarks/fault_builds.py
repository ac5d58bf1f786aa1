"""Row 17 of the fault scoreboard: kills while DeepSpeed compiles an operator, then the same command again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.fault_contenders import ZERO3_OFFLOAD, Contender
from benchmarks.fault_runs import Counts, Found, Job, ended, kill_processes_of
from tests.faults.runs import environment, processes_of
from tests.ranks.launching import ROOT

OPERATORS = "TORCH_EXTENSIONS_DIR"
COMPILES_WITHIN_S = 60  # a start takes 10 to 20 s to reach its compiler
BUILD_S = 900
COMPILER = "cc1plus"


def kills_of_builds(contender: Contender, counts: Counts, work: Path) -> Found:
    """Kill a run again and again while it compiles, each time in one folder of operators; then let one run end."""
    if not (kills := counts["kills of a build"]):
        return {"not run": "the full counts alone"}
    job, operators, draw = Job(contender, work, ZERO3_OFFLOAD), work / "operators", random.Random(17)
    found = Counter[str]()
    for number in range(kills):
        found[_killed_while_it_compiled(job, work / f"killed-{number}", operators, draw.uniform(0, 10))] += 1
    since = time.monotonic()
    code, _ = job.run(work / "last", timeout_s=BUILD_S, **{OPERATORS: str(operators)})
    last = "ended" if code == 0 and ended(work / "last") else f"exit code {code}"
    return {"the same command again": dict(found), "the last": {last: 1, "seconds": round(time.monotonic() - since)}}


def _killed_while_it_compiled(job: Job, folder: Path, operators: Path, seconds: float) -> str:
    """Start a run, and kill all of it some seconds after its compiler began; what the start did before."""
    variables = {**environment(folder), OPERATORS: str(operators)}
    null = subprocess.DEVNULL
    started = subprocess.Popen(
        job.words(folder), cwd=ROOT, env=variables, stdout=null, stderr=null, start_new_session=True
    )
    deadline = time.monotonic() + COMPILES_WITHIN_S
    try:
        while not _compiles(folder):
            if time.monotonic() > deadline:
                return "waited without end"
            if started.poll() is not None:
                return "used what was built" if started.returncode == 0 else f"exit code {started.returncode}"
            time.sleep(0.05)
        time.sleep(seconds)
        return "compiled at once"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        kill_processes_of(folder)
        started.wait()


def _compiles(folder: Path) -> bool:
    """Whether a compiler runs among the processes of a run."""
    names = []
    for pid in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            names.append(psutil.Process(pid).name())
    return COMPILER in names
