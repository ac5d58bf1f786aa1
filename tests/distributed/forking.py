"""Run scripts in processes that have imported everything already: starting python anew takes 5 seconds of each test.

Each run is a fork of one server, which has executed the scripts' imports and nothing else.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fork(command: list[str], environment: dict[str, str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT FLAGS...` gives.

    Args:
        command: the script, from the repository's root, and its flags.
        environment: of the script. What libraries read when they are imported, they have read from the server's.
        timeout_s: after which the script is killed.
    """
    server = _server(tuple(sorted((name, environment[name]) for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS"))))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        job = {"command": command, "environment": environment, "timeout_s": timeout_s, "folder": folder}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        said = [Path(folder, name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(command, code, *said)


@functools.cache
def _server(variables: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """One for each process that tests; it ends when its standard input is closed, with that process."""
    environment = {**os.environ, **dict(variables), "HF_TOKEN_PATH": os.devnull}
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else an import may open the GPU, which forks cannot use then
    return subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.forking"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for script in ("train_sentiment.py", "train_llama.py"):
        runpy.run_path(f"scripts/{script}", run_name="imported")
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**job)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(command: list[str], environment: dict[str, str], timeout_s: int, folder: str) -> None:
    signal.alarm(timeout_s)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.argv = command
    sys.path[0] = str(ROOT / Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
