"""Output: rank 0 on the console, each rank in its own log."""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from indictune.console_text import in_one_line, printable
from indictune.credentials import without_tokens

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
    """Prints our own messages on the console of rank 0, above a progress bar.

    Args:
        stream: the console.
    """

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
    Rank 0's `sys.stderr` stays the console, for the progress bar.

    Args:
        output_dir: of the run.
        rank: of this process.
        verbose: show the messages of other libraries on the console too.

    Attributes:
        descriptors: of the files that our own messages of this rank go to.
    """

    def __init__(self, output_dir: Path, rank: int, verbose: bool) -> None:
        without_tokens("")  # reads the user's token, which logging must not do first
        folder = output_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        self.console = _text(Unfailing(os.dup(2), "wb"), "replace")
        self.results = _text(io.FileIO(os.dup(1), "wb"), "replace")
        self.path = folder / f"rank-{rank}.log"
        file = _text(Unfailing(self.path, "ab"), "backslashreplace")
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


class Unfailing(io.FileIO):
    """A file whose writes never fail: a full disk or a closed console ends no run, and the text is lost."""

    def write(self, content: Any, /) -> int:
        """Write, and report success in any case."""
        try:
            written = super().write(content)
        except OSError:
            written = None
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
    logging.getLogger("DeepSpeed").disabled = True  # it gets a handler of its own when it is imported later
    logging.getLogger(PACKAGE).setLevel(logging.INFO)


def _quieten_libraries() -> None:
    """Remove the handlers of other libraries, so that their messages reach the rank's log through the root."""
    import datasets
    import transformers

    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    # The bars of reading and writing weights and rows; training keeps its bar.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
    for name in ("DeepSpeed", "datasets", "accelerate", "bitsandbytes"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
