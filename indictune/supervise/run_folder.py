"""A run's folder: may a run write there, how does a command end, and what does each rank log."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from filelock import Timeout
from tqdm import tqdm

from indictune import files
from indictune.config.command_line import LAUNCHED_BY, STATUS_FILE
from indictune.console_text import in_one_line, printable
from indictune.credentials import without_tokens
from indictune.errors import Problem, UserError, problems_of
from indictune.stop_signals import EXIT_RESUMABLE, OF_SCHEDULERS, killed_processes

logger = logging.getLogger(__name__)

State = Literal["ok", "user_error", "failed", "resumable"]

STATUS = "status.json"
RUN_LOCK = ".lock"
PATIENCE_S = 120.0  # a file server may keep the lock of a dead machine: NFS 4 for 90 s
EXIT_CODES: dict[State, int] = {"ok": 0, "failed": 1, "user_error": 2, "resumable": EXIT_RESUMABLE}
# Each shows that a run trained here. Logs, a status and a recipe alone may be those of a mistyped command.
_OF_A_RUN = (files.METRICS, "train_log.jsonl", "trainer_state.json")
# A run overwrites these too, and they may be the user's own.
_OVERWRITTEN = ("README.md", "config.json", "model.safetensors", "adapter_model.safetensors")
# What a run opens in its folder for writing. All other files are written elsewhere and moved into place.
_OPENED = (
    *("train_log.jsonl", "nonfinite.jsonl", "rejected.jsonl", "logs", "logs/*", "runs"),
    *(RUN_LOCK, ".unfinished-checkpoint", ".unfinished-model"),
    "figures",  # of the report
    "README.md",  # the Trainer's card of what is pushed (transformers 5.23)
)


def write_status(output_dir: Path | None, state: State, message: str, problems: Sequence[Problem] = ()) -> None:
    """Write `status.json`: how the latest command on this folder ended. Exit codes do not survive launchers.

    A caller from Python gets the same in a file of its own, without a folder too.
    """
    content: dict[str, Any] = {"state": state, "message": message}
    if problems:
        texts = [{"code": each.code, "flag": each.flag, "text": without_tokens(str(each))} for each in problems]
        content["problems"] = texts
    if asked := os.environ.get(STATUS_FILE):
        files.write_json(Path(asked), content)
    if output_dir is not None:
        files.write_json(output_dir / STATUS, content)


def status_since(output_dir: Path, since: float) -> dict[str, str]:
    """`status.json`, if it was written after `since`, in seconds since 1970; else an empty dict."""
    status = output_dir / STATUS
    with suppress(OSError):
        return files.json_or_nothing(status) if status.stat().st_mtime >= since else {}
    return {}


def check_folder(output_dir: Path) -> None:
    """Refuse a folder that is a file or in a checkpoint, or holds links where a run writes."""
    files.check_outside_checkpoints(output_dir, "--output_dir")
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError("folder-expected", "--output_dir", output_dir)
    # By `glob` a plain name is not there where it is a link to nothing (Python 3.11).
    paths = [path for pattern in _OPENED for path in (output_dir / pattern, *sorted(output_dir.glob(pattern)))]
    for path in paths:
        if path.is_symlink():
            raise UserError("output-dir-has-link", "--output_dir", output_dir, link=path.relative_to(output_dir))


def make_folder(flag: str, folder: Path, must_be_empty: bool = False) -> None:
    """Make a folder that gets something at the end, before runs take their time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if must_be_empty and any(folder.iterdir()):
            raise UserError("folder-not-empty", flag, folder)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError("folder-not-writable", flag, folder, reason=error.strerror) from error


def holds_files(output_dir: Path) -> bool:
    """Whether a new run would overwrite something there."""
    return bool(problems_of(check_free, output_dir, None))


def check_free(output_dir: Path, resume_from_checkpoint: str | None, replaceable: Collection[str] = ()) -> None:
    """Refuse to overwrite another run, or files of the user, but for `replaceable` ones.

    With `resume_from_checkpoint`, a run that is there is this one.
    """
    names = _OF_A_RUN if replaceable else _OF_A_RUN + _OVERWRITTEN
    held = [name for name in names if name not in replaceable and (output_dir / name).exists()]
    held += [path.name for path in sorted(output_dir.glob("checkpoint-*"))]
    is_run = bool(set(held) - {*_OVERWRITTEN}) or any(output_dir.glob("logs/rank-*.log"))
    if held and (resume_from_checkpoint is None or not is_run):
        way_out = None if is_run and not replaceable else "Use another folder."
        raise UserError("output-dir-holds-files", "--output_dir", output_dir, way_out, held=", ".join(held[:3]))


def lock_run_folder(output_dir: Path, launch: str) -> AbstractContextManager[object]:
    """Lock a run's folder for this process, and write into the lock whose it is, by its `elastic.launch_name`.

    A `UserError` names another process that has it.
    """
    path = output_dir / RUN_LOCK
    try:
        held = files.lock_if_possible(path)
    except Timeout:
        other, _ = _holder_and_launch(path)
        raise UserError("run-folder-in-use", "--output_dir", output_dir, other=other) from None
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n{launch}")
        file.flush()
        os.fsync(file.fileno())  # other machines see it at once
    return held


def wait_for_other_launch(output_dir: Path, launch: str, rank: int) -> None:
    """Wait while a process of another launch has a run's folder; a `UserError` if it keeps it.

    Rank 0 waits only for another machine, which may be dead. The other ranks wait until rank 0 is refused and their
    launcher ends them.
    """
    deadline, is_told = time.monotonic() + PATIENCE_S, rank != 0
    while (other := of_another_launch(output_dir, launch)) is not None:
        if time.monotonic() > deadline or (rank == 0 and other.endswith(f" on {socket.gethostname()}")):
            raise UserError("run-folder-in-use", "--output_dir", output_dir, other=other)
        if not is_told:
            logger.warning("--output_dir %s: %s writes to it. Waiting for its end.", output_dir, other)
            is_told = True


def of_another_launch(output_dir: Path, launch: str) -> str | None:
    """The process of another launch that has the folder; None without one. Takes up to a second to see it."""
    path = output_dir / RUN_LOCK
    try:
        if _holder_and_launch(path)[1] != launch:
            with files.lock_file(path):
                pass
    except Timeout:
        holder, its_launch = _holder_and_launch(path)
        return None if its_launch == launch else holder
    except OSError:  # there is no lock, or the file system has no locks
        pass
    return None


def _holder_and_launch(path: Path) -> tuple[str, str]:
    holder, _, launch = path.read_text(encoding="utf-8").partition("\n")
    return holder, launch


CONSOLE = "console.log"
_ENDED = ".ended.json"  # of a run that was refused before it had its folder, too
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, as in `status.json`, and why if it is not ok."""

    state: str
    message: str


def run_in_folder(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], is_enough: Callable[[], bool] = lambda: False
) -> RunEnd:
    """Start the command of a run whose `--output_dir` is the folder, and wait. Its console goes to a file there.

    When `is_enough`, which is asked twice a second, the run gets a SIGTERM, by which it saves and ends. The run has a
    session of its own: Ctrl-C reaches only this process, whose handler passes it on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    status, kills, code = folder / _ENDED, killed_processes(), None
    status.unlink(missing_ok=True)
    ours = {LAUNCHED_BY: str(os.getpid()), STATUS_FILE: str(status.absolute())}
    environ, nothing = {**os.environ, **ours, **variables}, subprocess.DEVNULL
    with (folder / CONSOLE).open("ab") as said:
        run = subprocess.Popen(command, 0, None, nothing, said, said, env=environ, start_new_session=True)
    with run:
        while code is None:
            if is_enough():
                run.terminate()
                code = run.wait()
            with suppress(subprocess.TimeoutExpired):
                code = run.wait(_LOOK_EVERY_S)
    if code == 0:
        return RunEnd("ok", "")
    if code == -signal.SIGKILL and killed_processes() > kills:
        return RunEnd("failed", "The kernel killed it for lack of memory.")
    state = next((state for state, number in EXIT_CODES.items() if number == code), "failed")
    lines = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    message = f"exit code {code}: {lines[-1] if lines else 'it said nothing'}"
    known = files.json_or_nothing(status)
    return RunEnd(known.get("state", state), known.get("message", message))


def run_launcher(command: Sequence[str], output_dir: Path) -> int:
    """Run a launcher. Exit codes of ranks do not survive it, so what rank 0 wrote here, or in the folder, gives it."""
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="indictune-") as folder:
        status = Path(os.environ.get(STATUS_FILE, f"{folder}/status.json"))
        code = wait_for(command, **{STATUS_FILE: str(status)})
        state = (files.json_or_nothing(status) or status_since(output_dir, began)).get("state")
    return next((each for name, each in EXIT_CODES.items() if name == state and each), 1) if code else 0


def wait_for(command: Sequence[str], **variables: str) -> int:
    """Run a command to its end, and pass on to it the signals that stop this process."""
    environ = {**os.environ, LAUNCHED_BY: str(os.getpid()), **variables}
    with subprocess.Popen(command, env=environ) as launched:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the launched process too
        for number in OF_SCHEDULERS:
            signal.signal(number, lambda *_: launched.send_signal(signal.SIGTERM))
        return launched.wait()


PACKAGE = "indictune"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class PrintableFormatter(logging.Formatter):
    """Formats a message without tokens and control characters, and our own messages on one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        message = super().formatMessage(record)
        return in_one_line(message) if record.name.partition(".")[0] == PACKAGE else message

    def format(self, record: logging.LogRecord) -> str:
        return printable(without_tokens(super().format(record)))


class ConsoleHandler(logging.Handler):
    """Prints our own messages on the console of rank 0, above a progress bar."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        tqdm.write(level + in_one_line(without_tokens(record.getMessage())), file=self.stream)
        self.stream.flush()


class RankLog:
    """Sends all output of this process to `logs/rank-<rank>.log`, and our own messages of rank 0 to the console too.

    It redirects the file descriptors, because the C++ code of torch and gloo, and DeepSpeed, print without a logger.
    Rank 0's `sys.stderr` stays the console, for the progress bar. If `verbose`, the messages of other libraries go to
    the console too.

    Attributes:
        descriptors: of the files that our own messages of this rank go to.
    """

    def __init__(self, output_dir: Path, rank: int, verbose: bool) -> None:
        without_tokens("")  # reads the user's token, which logging must not do first
        folder = output_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.console = _text(NeverFailingFile(os.dup(2), "wb"), "replace")
        self.results = _text(io.FileIO(os.dup(1), "wb"), "replace")
        self.path = folder / f"rank-{rank}.log"
        file = _text(NeverFailingFile(self.path, "ab"), "backslashreplace")
        self.descriptors = [*([self.console.fileno()] if rank == 0 else []), file.fileno()]
        file_handler = logging.StreamHandler(file)
        file_handler.setFormatter(PrintableFormatter(FORMAT))
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        root.addHandler(file_handler)
        quieten_requests()
        logging.captureWarnings(True)
        ours = logging.getLogger(PACKAGE)
        ours.setLevel(logging.DEBUG)  # for the file; the console starts at INFO
        if rank == 0:
            ours.addHandler(ConsoleHandler(self.console))
        if verbose:
            console = logging.StreamHandler(self.console)
            console.setFormatter(PrintableFormatter())
            root.addHandler(console)
            return
        _quieten_libraries()
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = file
        sys.stderr = self.console if rank == 0 else file


class NeverFailingFile(io.FileIO):
    """A file whose writes never fail: a full disk or a closed console ends no run, and the text is lost."""

    def write(self, content: Any, /) -> int:
        """Write, and report success in any case."""
        written = None
        with suppress(OSError):
            written = super().write(content)
        return memoryview(content).nbytes if written is None else written


def _text(file: io.FileIO, errors: str) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors=errors, line_buffering=True)


def quieten_requests() -> None:
    """Keep URLs, which may hold tokens, off the console.

    The client of huggingface_hub (2.4: httpx2; others: httpx) logs the whole URL of each request, and huggingface_hub
    prints its warnings by its own handler.
    """
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").handlers.clear()


def log_to_console() -> None:
    """Set up logging for a command without a run: our own messages and errors of libraries, without their bars."""
    console = logging.StreamHandler()
    console.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.ERROR, handlers=[console])
    _quieten_libraries()
    quieten_requests()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").disabled = True  # it gets a handler of its own when it is imported later
    logging.getLogger(PACKAGE).setLevel(logging.INFO)


def _quieten_libraries() -> None:
    """Remove the handlers of other libraries, so that their messages reach the rank's log through the root."""
    import datasets
    import transformers

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    warnings.simplefilter("ignore", FutureWarning)  # libraries warn each other: peft 0.21 takes old names
    # The bars of reading and writing weights and rows; training keeps its bar.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    for name in ("DeepSpeed", "datasets", "accelerate", "bitsandbytes"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
