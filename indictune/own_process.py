"""Run verbs in processes of their own for a Python program: show their output, and raise what they end with."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import NamedTuple

from indictune.config.command_line import STATUS_FILE
from indictune.errors import UserError

_STEP = re.compile(r"step (\d+) of (\d+): (.*)")
_SERVING = re.compile(r"Serving .* on (http\S+)\. Try")
_REFUSED, _STOPPED = 2, 75  # exit codes of the command


class Reported(NamedTuple):
    """A problem that the process of a run reported; as `errors.Problem`."""

    code: str
    flag: str
    text: str

    def __str__(self) -> str:
        return self.text


def run_verb(
    words: Sequence[str], metrics: Mapping[str, object] | None = None, callbacks: Sequence[object] = ()
) -> None:
    """Run a verb, show its output with a progress bar, and raise what it ends with.

    Its process gets copies of the functions: see `python_objects.functions_file`.
    """
    from indictune.python_objects import functions_file

    with functions_file(metrics or {}, callbacks) as variable, _status() as status:
        _check(words[0], _shown_until_end(_command(words), _environ(status, variable)), status)


def answer_of(words: Sequence[str]) -> str:
    """What a verb prints. Its messages are shown at its end; errors as of `run_verb`."""
    with _status() as status:
        done = subprocess.run(_command(words), env=_environ(status), encoding="utf-8", capture_output=True)
        print(done.stderr, end="", file=sys.stderr)
        _check(words[0], done.returncode, status)
    return done.stdout


class Server:
    """A server in a process of its own. As a context manager it stops at the end of the block.

    Attributes:
        url: where it answers.
    """

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self._process = url, process
        atexit.register(self.stop)  # else it would outlive the program

    def __repr__(self) -> str:
        return f"<Server {self.url}, {'running' if self._process.poll() is None else 'stopped'}>"

    def stop(self) -> None:
        """Answer what was accepted, and end the process."""
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def serving(words: Sequence[str]) -> Server:
    """The server that a verb starts, once it answers; errors as of `run_verb`."""
    with _status() as status:
        pipe, errors = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(_command(words), env=_environ(status), encoding="utf-8", stdout=pipe, stderr=errors)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := _SERVING.search(line):
                    Thread(target=process.stdout.read, daemon=True).start()  # its log, which would fill the pipe
                    return Server(found[1], process)
                print(line, end="")
        except KeyboardInterrupt:
            process.terminate()
            raise
        _check(words[0], process.wait(), status)
    raise RuntimeError(f"`indictune {words[0]}` ended before it served")


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "indictune", *words]


@contextmanager
def _status() -> Iterator[Path]:
    """The file that gets the status of a command."""
    with TemporaryDirectory(prefix="indictune-") as folder:
        yield Path(folder, "status.json")


def _environ(status: Path, variable: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, STATUS_FILE: str(status), **(variable or {})}


def _check(verb: str, code: int, status: Path) -> None:
    """Raise what a command has ended with."""
    from indictune.files import json_or_nothing

    ended = json_or_nothing(status)
    message = ended.get("message", "")
    if code == _REFUSED:
        problems = [Reported(**each) for each in ended.get("problems", ())]
        raise UserError(problems=problems or [Reported("", "", message)])
    if code == _STOPPED:
        raise KeyboardInterrupt(message)
    if code != 0:
        raise RuntimeError(message or f"`indictune {verb}` ended with code {code}")


def _shown_until_end(command: Sequence[str], environ: Mapping[str, str]) -> int:
    pipe, errors = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environ, encoding="utf-8", stdout=pipe, stderr=errors) as running:
        assert running.stdout is not None
        try:
            _show(running.stdout)
            return running.wait()
        except KeyboardInterrupt:
            running.send_signal(signal.SIGTERM)  # it saves a checkpoint
            running.wait()
            raise


def _show(lines: Iterable[str]) -> None:
    """Print the lines of a run. Those of its steps move a bar, on a terminal and in a notebook."""
    from tqdm import TqdmWarning

    with warnings.catch_warnings(action="ignore", category=TqdmWarning):  # of a notebook without ipywidgets
        from tqdm.auto import tqdm
    has_bar, bar = "ipykernel" in sys.modules or sys.stderr.isatty(), None
    for line in lines:
        step = _STEP.search(line) if has_bar else None
        if step is None:
            tqdm.write(line, end="")
            continue
        bar = bar or tqdm(unit="step", total=int(step[2]))
        bar.set_postfix_str(step[3].strip(), refresh=False)
        bar.update(int(step[1]) - bar.n)
        if bar.n == bar.total and "validation" in step[3]:
            bar.close()
    if bar is not None:
        bar.close()
