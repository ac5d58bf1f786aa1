"""Who says what, and where: rank 0 on the console, every rank in its own file."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from indictune.console_text import in_one_line, printable
from indictune.credentials import without_tokens

PACKAGE = "indictune"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TokenlessFormatter(logging.Formatter):
    """A message without the tokens in it, whoever says it."""

    def format(self, record: logging.LogRecord) -> str:
        return without_tokens(super().format(record))


class PrintableFormatter(TokenlessFormatter):
    """A message as a terminal may get it, whatever data it tells of; ours in one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        message = super().formatMessage(record)
        return in_one_line(message) if record.name.partition(".")[0] == PACKAGE else message

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class ConsoleHandler(logging.Handler):
    """The package's messages on the console: all of rank 0's, and of other ranks each warning once, with the rank.

    Args:
        stream: the console.
        rank: of this process.
        told: folder shared by all ranks; a file in it stands for a warning that somebody has told.
    """

    HEAD_START_S = 0.5  # for rank 0, which mostly has the same warning at the same time

    def __init__(self, stream: TextIO, rank: int, told: Path) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self.stream = stream
        self.rank = rank
        self.told = told

    def emit(self, record: logging.LogRecord) -> None:
        message = in_one_line(without_tokens(record.getMessage()))
        if record.levelno >= logging.WARNING:
            if not self._is_first(message) and self.rank != 0:
                return
            message = f"{record.levelname.lower()}: {message}" if self.rank == 0 else f"[rank {self.rank}] {message}"
        tqdm.write(message, file=self.stream)  # above a progress bar, where there is one
        self.stream.flush()

    def _is_first(self, message: str) -> bool:
        """Whether no rank has told this warning yet in this run. Creating a file is the one atomic step they share."""
        name = hashlib.sha256(message.encode()).hexdigest()[:16]
        if self.rank != 0 and not (self.told / name).exists():
            time.sleep(self.HEAD_START_S)
        try:
            (self.told / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # better twice than never; a full disk must not end a run here
        return True


class RankLog:
    """Sends everything that this process prints to `logs/rank-<rank>.log`, and our own messages to the console too.

    The redirection is of the file descriptors, because torch's and gloo's C++ code and DeepSpeed print without asking
    any logger. Rank 0's `sys.stderr` stays the console: the progress bar writes there.

    Args:
        output_dir: of the run.
        rank: of this process.
        verbose: leave the other libraries' messages on the console too.

    Attributes:
        descriptors: of the files that our own messages of this rank go to.
    """

    def __init__(self, output_dir: Path, rank: int, verbose: bool) -> None:
        without_tokens("")  # looks for the user's token, which no log line may do first
        folder = output_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        told = folder / ".told"
        if rank == 0:
            shutil.rmtree(told, ignore_errors=True)
        told.mkdir(exist_ok=True)
        self.console = _text(Unfailing(os.dup(2), "wb"), "replace")
        self.results = _text(io.FileIO(os.dup(1), "wb"), "replace")
        self.path = folder / f"rank-{rank}.log"
        file = _text(Unfailing(self.path, "ab"), "backslashreplace")
        self.descriptors = [*([self.console.fileno()] if rank == 0 else []), file.fileno()]
        file_handler = logging.StreamHandler(file)
        file_handler.setFormatter(TokenlessFormatter(FORMAT))
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        root.addHandler(file_handler)
        quieten_requests()
        logging.captureWarnings(True)
        ours = logging.getLogger(PACKAGE)
        ours.setLevel(logging.DEBUG)  # for the file; the console takes what concerns the user
        ours.addHandler(ConsoleHandler(self.console, rank, told))
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


class Unfailing(io.FileIO):
    """What a run says while it goes on. A full disk, or a console that is gone, ends no run: its words are lost."""

    def write(self, content: Any, /) -> int:
        """All of it, as far as the caller can tell."""
        try:
            written = super().write(content)
        except OSError:
            written = None
        return memoryview(content).nbytes if written is None else written


def _text(file: io.FileIO, errors: str) -> TextIO:
    return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8", errors=errors, line_buffering=True)


def quieten_requests() -> None:
    """The client of huggingface_hub (2.4: httpx2; others: httpx) tells of every request with its whole URL, and
    huggingface_hub has a handler of its own, which would write what it warns of past ours."""
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").handlers.clear()


def log_to_console() -> None:
    """Set up logging for a command without a run: warnings of libraries and our own messages on the console."""
    console = logging.StreamHandler()
    console.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[console])
    quieten_requests()
    logging.getLogger(PACKAGE).setLevel(logging.INFO)


def _quieten_libraries() -> None:
    """Take the other libraries' own handlers away, so that their messages reach the rank file through the root."""
    import transformers

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    # Of loading and writing weights; training keeps its own.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    for name in ("DeepSpeed", "datasets", "accelerate", "bitsandbytes"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
