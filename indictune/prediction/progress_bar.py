"""Show how many rows are labelled: a bar on a terminal, and a line now and then in a file or a pipe."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from indictune.progress import OWN_PROGRESS

EVERY_S = 30.0


class Progress:
    """The progress of one command, on standard error.

    Args:
        rows: of the file.
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
        if self._is_shown and self._bar.disable and time.monotonic() - self._told > EVERY_S:
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
