"""Keep the labelled windows of an unfinished command on disk: a killed command resumes. Show its progress."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
from filelock import Timeout
from tqdm import tqdm

from indictune.data.cache import stored_batches, write_through
from indictune.errors import UserError
from indictune.files import NO_ROOM, REFUSED, check_outside_checkpoints, lock_if_possible
from indictune.prediction.labelled_rows import writer_of
from indictune.run import OWN_PROGRESS

FLAG = "--output_file"
_JOB = "job.json"
_WINDOW = ".arrow"
LOOK_EVERY_S = 0.2
WAIT_FOR_RANK_0_S = 600.0  # it reads the same file and weights at the same time
_TELL_EVERY_S = 30.0


class LabelledWindows:
    """Labelled windows in a hidden folder next to the output, one file each. All ranks share the folder.

    Args:
        output: gets all rows in the end.
        job: all that the labels depend on; windows of another job are dropped.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], count: int) -> None:
        self.output = output
        self.count = count
        self.folder = output.with_name(f".{output.name}.unfinished")
        self._job = json.dumps(job, ensure_ascii=False, sort_keys=True)

    def open(self) -> None:
        """On rank 0: make the folder, or keep the windows of a killed command that was the same.

        Raises:
            UserError: the folder cannot be written to, or another command writes there.
        """
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = lock_if_possible(self.folder / "lock")
            except Timeout:
                raise UserError("predict-in-progress", FLAG, self.output, folder=self.folder) from None
            if not self.is_open():
                for path in self.folder.glob(f"*{_WINDOW}"):
                    path.unlink()
                self._write(_JOB, self._job.encode())

    def is_open(self) -> bool:
        """Whether the folder is that of this job."""
        try:
            return (self.folder / _JOB).read_text(encoding="utf-8") == self._job
        except (OSError, UnicodeDecodeError):
            return False

    def wait_until_open(self) -> bool:
        """On another rank: wait for rank 0. False if it has labelled all windows and written the output meanwhile.

        Raises:
            UserError: `predict-without-rank-0`.
        """
        since = time.monotonic()
        while not self.is_open():
            if self.output.exists():
                return False
            if time.monotonic() - since > WAIT_FOR_RANK_0_S:
                minutes = round(WAIT_FOR_RANK_0_S / 60)
                raise UserError("predict-without-rank-0", FLAG, self.output, folder=self.folder, minutes=minutes)
            time.sleep(LOOK_EVERY_S)
        return True

    def has(self, number: int) -> bool:
        """Whether a window is labelled."""
        return self._path(number).exists()

    def done(self) -> int:
        """How many windows are labelled."""
        return sum(name.endswith(_WINDOW) for name in os.listdir(self.folder))

    def put(self, number: int, batch: pa.RecordBatch) -> None:
        """Keep a labelled window, whole or not at all.

        Raises:
            UserError: the disk does not take it.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        with self.writing():
            self._write(self._path(number).name, sink.getvalue())

    def finish(self) -> None:
        """Write the output, whole or not at all, and remove the folder.

        Raises:
            UserError: the disk does not take it.
        """
        with self.writing():
            _write_whole(self.output, self.folder / "output", self._batches())
        shutil.rmtree(self.folder, ignore_errors=True)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for number in range(self.count):
            yield from stored_batches(self._path(number))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}{_WINDOW}"

    def _write(self, name: str, content: Any) -> None:
        unfinished = self.folder / f"{name}.{os.getpid()}"
        try:
            unfinished.write_bytes(content)
            write_through(unfinished)
            unfinished.replace(self.folder / name)
        finally:
            unfinished.unlink(missing_ok=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block that writes. If the disk refuses, only whole windows are left.

        Raises:
            UserError: `output-not-written`.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in NO_ROOM | REFUSED:
                raise
            kept = self.done() if self.folder.is_dir() else 0
            if not kept:
                shutil.rmtree(self.folder, ignore_errors=True)
            way_out = f"Make room, and repeat the command: it keeps {kept} of {self.count} parts." if kept else None
            raise UserError("output-not-written", FLAG, self.output, way_out, reason=error.strerror) from error


def check_output(path: str) -> None:
    """Refuse an output that exists, of an unknown kind, or in no folder.

    Raises:
        UserError: one of these.
    """
    writer_of(path)
    output = Path(path)
    check_outside_checkpoints(output, FLAG)
    if os.path.lexists(output):
        raise UserError("output-exists", FLAG, output)
    if not output.parent.is_dir():
        raise UserError("no-output-folder", FLAG, output, folder=output.parent)


def write_output(output: Path, batches: Iterable[pa.RecordBatch]) -> None:
    """Write labelled rows, whole or not at all.

    Raises:
        UserError: `output-not-written`.
    """
    try:
        _write_whole(output, output.with_name(f".{output.name}.{os.getpid()}"), batches)
    except OSError as error:
        if error.errno not in NO_ROOM | REFUSED:
            raise
        raise UserError("output-not-written", FLAG, output, reason=error.strerror) from error


def _write_whole(output: Path, unfinished: Path, batches: Iterable[pa.RecordBatch]) -> None:
    try:
        with unfinished.open("wb") as file:
            writer_of(str(output))(file, batches)
        write_through(unfinished)
        unfinished.replace(output)
        write_through(output.parent)
    finally:
        unfinished.unlink(missing_ok=True)


class LabellingProgress:
    """The progress of one command, on standard error.

    Args:
        done: rows that an earlier, killed command has labelled.
        is_shown: whether this process shows it.
    """

    def __init__(self, rows: int, done: int, is_shown: bool) -> None:
        self._rows = rows
        self._began_with = self._done = min(done, rows)
        self._began = self._told = time.monotonic()
        self._is_shown = is_shown
        on_terminal = is_shown and sys.stderr.isatty()
        self._bar = tqdm(total=rows, initial=self._done, unit=" rows", disable=not on_terminal, dynamic_ncols=True)
        if is_shown and self._done:
            self._tell(f"resuming: {self._done:,} of {rows:,} rows are labelled")

    def show(self, done: int) -> None:
        """Show that so many rows are labelled."""
        done = min(done, self._rows)
        OWN_PROGRESS.moved()
        self._bar.update(done - self._done)
        self._done = done
        if self._is_shown and self._bar.disable and time.monotonic() - self._told > _TELL_EVERY_S:
            self._told = time.monotonic()
            left_s = (self._rows - done) / max(self._rate, 1e-9)
            self._tell(f"{done:,} of {self._rows:,} rows, {self._rate:,.0f} rows/s, {duration(left_s)} left")

    @property
    def _rate(self) -> float:
        return (self._done - self._began_with) / (time.monotonic() - self._began)

    def _tell(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._is_shown and kind is None:
            labelled = self._done - self._began_with
            self._tell(f"{labelled:,} rows in {duration(time.monotonic() - self._began)} ({self._rate:,.0f} rows/s)")


def duration(seconds: float) -> str:
    """Seconds as `5 s`, `3 min` or `2 h 5 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
