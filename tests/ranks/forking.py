"""Run scripts in processes that have imported everything already: starting python anew takes 5 seconds of each.

Where there is no GPU, that is: an import may open it, and no fork can use it then.

One server has executed the imports of the scripts and of their launchers, and nothing else; each process is a fork of
it. A launcher runs as it always does, but for what it starts: `rank.py`, which asks the server for the fork that is
the rank, lends it its environment and files, hands signals on to it, and ends as it ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RANK = "tests/ranks/rank.py"
SOCKET = "TEST_SERVER_SOCKET"
SERVERS = "TEST_SERVERS"
LAUNCHERS = ("accelerate.commands.accelerate_cli", "torch.distributed.run", "deepspeed.launcher.runner")
# What runs import after they have begun. Baselines are made by scikit-learn, whose import takes a second.
LATE = (
    "indictune.training.chat_trainer",
    "indictune.training.finish",
    "indictune.training.evaluation",
    "indictune.training.rank_consistency",
    "indictune.training.callbacks.parity_trace",
    "indictune.training.callbacks.restore_progress",
    "indictune.distributed.context",
    "indictune.doctor.examination",
    "indictune.planning.machine_failures",
    "indictune.distributed.agreement",
    "indictune.distributed.vocabulary_choice",
    "indictune.evaluation.own_metrics",
    "sacrebleu",
    "rensa",
    "sklearn.feature_extraction.text",
    "sklearn.linear_model",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
)

_code: int | None = None  # with which this fork ends, where its script has decided that


def fork(command: list[str], environment: dict[str, str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    """What `python SCRIPT FLAGS...` gives.

    Args:
        command: the script, from the repository's root, and its flags.
        environment: of the script. What libraries read when they are imported, they have read from the server's.
        timeout_s: after which the script is killed.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    path = _path(environment)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "rb") as nothing:
        names = [Path(folder, name) for name in ("stdout", "stderr")]
        with names[0].open("ab") as stdout, names[1].open("ab") as stderr:
            files = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
            try:
                code = Fork(path, command, {**environment, SOCKET: path}, files, timeout_s).wait()
            except TimeoutError:
                raise subprocess.TimeoutExpired(command, timeout_s) from None
        said = [name.read_text(encoding="utf-8", errors="replace") for name in names]
    return subprocess.CompletedProcess(command, code, *said)


class Fork:
    """A process that the server has forked; it is killed when whoever asked for it is gone.

    Args:
        path: of the server's socket.
        command: a script, from the repository's root, and its flags.
        environment: of the process.
        files: descriptors of its standard input, output and error.
        timeout_s: after which `wait` gives up; None never.
    """

    def __init__(
        self, path: str, command: list[str], environment: dict[str, str], files: list[int], timeout_s: float | None
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(timeout_s)
        self._connection.connect(path)
        job = {"command": command, "environment": environment}
        socket.send_fds(self._connection, [b"\n"], files)
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        self._answers = self._connection.makefile("rb")
        self.pid = int(self._answers.readline())

    def has_ended(self, seconds: float | None) -> bool:
        """Whether it has ended after so many seconds at most; None waits until it has."""
        return bool(select.select([self._connection], [], [], seconds)[0])

    def wait(self) -> int:
        """Its exit code; a signal's number, negative, where one has killed it."""
        with self._connection, self._answers:
            return int(self._answers.readline())


class Forked:
    """A fork in the background, with the methods of `subprocess.Popen` that the tests use. Its standard error is kept.

    Args:
        command: a script, from the repository's root, and its flags.
        environment: of the process, as of `fork`.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        path = _path(environment)
        self.args = command
        self.returncode: int | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, until this is gone
        with open(os.devnull, "r+b") as nothing:
            files = [nothing.fileno(), nothing.fileno(), self._said.fileno()]
            self._fork = Fork(path, command, {**environment, SOCKET: path}, files, None)
        self.pid = self._fork.pid

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, as `Popen` gives it.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        if self.returncode is None:
            if not self._fork.has_ended(timeout):
                raise subprocess.TimeoutExpired(self.args, float(timeout or 0))
            self.returncode = self._fork.wait()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code; None while it goes on."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Nothing and what it said, when it has ended."""
        self.wait(timeout)
        self._said.seek(0)
        return None, self._said.read().decode(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _path(environment: dict[str, str]) -> str:
    """Of the socket of the server that has read these variables."""
    of_hub = ("HF_ENDPOINT", "HF_HOME") if "HF_ENDPOINT" in environment else ()
    names = ("HF_HUB_OFFLINE", "OMP_NUM_THREADS", *of_hub)
    path, _ = _server(tuple(sorted((name, environment[name]) for name in names)))
    return path


@functools.cache
def _server(variables: tuple[tuple[str, str], ...]) -> tuple[str, int]:
    """The socket of a server, and what keeps it alive: it ends when no process has the other end of its input open.

    Processes that test side by side share it, by a folder that `SERVERS` names.
    """
    from filelock import FileLock  # not for every rank, which starts from this file too

    folder = os.environ.get(SERVERS)
    if folder is None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    name = Path(folder, "-".join(value.replace(os.sep, "_")[-30:] for _, value in variables))
    with FileLock(f"{name}.lock"):
        path = Path(f"{name}.socket")
        with suppress(OSError):  # there is none yet, or it has ended
            return str(path), os.open(f"{name}.input", os.O_WRONLY | os.O_NONBLOCK)
        for each in (path, Path(f"{name}.input")):
            each.unlink(missing_ok=True)
        os.mkfifo(f"{name}.input")
        reading = os.open(f"{name}.input", os.O_RDONLY | os.O_NONBLOCK)
        writing = os.open(f"{name}.input", os.O_WRONLY)
        environment = {**os.environ, **dict(variables), "HF_TOKEN_PATH": os.devnull}
        command = [sys.executable, "-m", "tests.ranks.forking", str(path)]
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=reading, stdout=subprocess.PIPE)
        os.close(reading)
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
    return str(path), writing


class _Server:
    """Forks a process for each connection, tells its exit code, and kills those whose connection is closed."""

    def __init__(self, path: str) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen()
        self.connections: dict[int, socket.socket] = {}  # by process
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listening, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Until the end; in a fork it returns what that has to run."""
        while True:
            for key, _ in self.selector.select(timeout=0.02 if self.connections else None):
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is self.listening:
                    job = self._fork()
                    if job is not None:
                        return job
                else:
                    self.selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            self._bury()

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self.listening.accept()
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as request:
            job: dict[str, Any] = json.loads(request.readline())
        pid = os.fork()
        if pid == 0:
            for number, file in enumerate(files):
                os.dup2(file, number)
            for each in (self.listening, connection, *self.connections.values()):
                each.close()
            self.selector.close()
            return job
        for file in files:
            os.close(file)
        self.connections[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        connection.sendall(f"{pid}\n".encode())
        return None

    def _bury(self) -> None:
        while self.connections:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection = self.connections.pop(pid)
            if connection in self.selector.get_map():
                self.selector.unregister(connection)
            with suppress(BrokenPipeError):  # who asked is gone
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _main() -> None:
    atexit.register(_end)  # before all others, so that it is called after all others
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what an import prints is no answer
        for script in ("train_sentiment.py", "train_llama.py"):
            runpy.run_path(f"scripts/{script}", run_name="imported")
        del sys.modules["indictune.training.run_task"]  # each run imports it, with the functions that a test replaces
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1)
        )  # `before_imports` is for a script
        os.environ["DS_ACCELERATOR"] = "cpu"
        for name in (*LAUNCHERS, *LATE):
            importlib.import_module(name)
        gc.freeze()  # what is here stays; a fork need not look through it
        server = _Server(sys.argv[1])
        print("ready", file=answers)
    job = server.serve()
    if job is not None:
        _run(**job)


def _end() -> None:
    """End without the clearing away of all modules: it takes most of a second, and copies the server's memory."""
    if _code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)


def _run(command: list[str], environment: dict[str, str]) -> None:
    global _code
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background ignores
    sys.argv = command
    sys.path[0] = str(ROOT / Path(command[0]).parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
        _code = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _code = (end.code or 0) & 0xFF
        raise


if __name__ == "__main__":
    _main()
