"""What a process knows of its run: its recipe, folder and console, and how far it is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from indictune.console_text import line_start, printable
from indictune.errors import linked
from indictune.stop_signals import StopRequest

if TYPE_CHECKING:
    from transformers import Trainer

    from indictune.config.plan import AnyPlan
    from indictune.config.recipe import Recipe

logger = logging.getLogger("indictune")

Each = TypeVar("Each")

LAST_BEFORE_A_WAIT = "a backward pass"  # in which a rank waits for the gradients of the others


class Progress:
    """Counts the places that all ranks pass in the same order, above all those after which they wait for each other.

    When nothing moves any more, all others wait for the rank with the lowest count.
    """

    def __init__(self) -> None:
        self.step = 0  # the last training step that ended
        self.count, self.place = 0, "the start"  # of the places passed so far, and the last one
        self._last = time.monotonic()

    def passed(self, place: str) -> None:
        """Note that this rank arrived at a place."""
        self.count += 1
        self.place = place
        self._last = time.monotonic()

    def passing(self, place: str, items: Iterable[Each]) -> Iterator[Each]:
        """Yield the items, and note with each that this rank arrived at a place."""
        for each in items:
            self.passed(place)
            yield each

    def moved(self) -> None:
        """Note that this rank works where it is."""
        self._last = time.monotonic()

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """A block in which this rank waits for the work of another one, which is thus behind it."""
        before = self.place
        self.passed(place)
        try:
            yield
        finally:
            self.count -= 1
            self.place = before
            self._last = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds since this rank moved."""
        return time.monotonic() - self._last


OWN_PROGRESS = Progress()
"""The progress of this process. Code that prepares rows or reads weights knows no run."""


class Run:
    """One run in this process.

    Attributes:
        is_named: whether the user named `output_dir`.
        results: stream for results.
        console: stream for messages.
        plan: with all derived values, once the process group is up.
        trainer: once it trains.
    """

    plan: AnyPlan | None = None
    trainer: Trainer | None = None

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe, self.rank = recipe, rank
        self.is_named = bool(recipe.values.get("output_dir"))
        self.output_dir = Path(recipe.values.get("output_dir") or ".")
        self.stop_request = StopRequest()
        self.results, self.console = sys.stdout, sys.stderr

    @property
    def console_values(self) -> dict[str, Any]:
        """Training arguments that follow from the console: a file and a pipe get lines, and no progress bar."""
        from transformers.utils.import_utils import is_in_notebook  # slow to import

        return {} if self.console.isatty() or is_in_notebook() else {"disable_tqdm": True}

    def lock_folder(self) -> None:
        """Keep other runs out of the folder. A supervised run does."""

    def show(self, text: str) -> None:
        """Print a result to standard output, on rank 0."""
        if self.rank == 0:
            print(printable(text), file=self.results, flush=True)

    def show_error(self, text: str) -> None:
        """Print to standard error on any rank, on a line of its own."""
        start = line_start(self.console.fileno()) if self.console.isatty() else ""
        print(f"{start}{linked(printable(text), self.console)}", file=self.console, flush=True)

    def warn(self, notes: Iterable[str]) -> None:
        """Warn the user, on the console and in the log."""
        for note in notes:
            logger.warning(note)
