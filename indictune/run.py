"""What a script and the trainers know of their run: its recipe, folder, stop request and console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.utils.import_utils import is_in_notebook

from indictune.config.plan import AnyPlan
from indictune.config.recipe import Recipe
from indictune.console_text import line_start, printable
from indictune.stop_signals import StopRequest

logger = logging.getLogger("indictune")


class Run:
    """One run in this process.

    Args:
        recipe: what the user gave.
        rank: of this process.

    Attributes:
        output_dir: of the run.
        is_named: whether the user named that folder.
        stop_request: whether a signal asks this process to stop.
        results: stream for results.
        console: stream for messages.
        plan: with all derived values, once the process group is up.
        trainer: once it trains.
    """

    plan: AnyPlan | None = None
    trainer: Trainer | None = None

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe = recipe
        self.rank = rank
        self.is_named = bool(recipe.values.get("output_dir"))
        self.output_dir = Path(recipe.values.get("output_dir") or ".")
        self.stop_request = StopRequest()
        self.results = sys.stdout
        self.console = sys.stderr

    @property
    def shows_bars(self) -> bool:
        """Whether the console can draw a progress bar. A file and a pipe get lines alone."""
        return self.console.isatty() or is_in_notebook()

    @property
    def console_values(self) -> dict[str, Any]:
        """Training arguments that follow from the console."""
        return {} if self.shows_bars else {"disable_tqdm": True}

    def lock_folder(self) -> None:
        """Keep other runs out of the folder. A supervised run does."""

    def show(self, text: str) -> None:
        """Print a result to standard output, on rank 0."""
        if self.rank == 0:
            print(printable(text), file=self.results, flush=True)

    def show_error(self, text: str) -> None:
        """Print to standard error on any rank, on a line of its own."""
        start = line_start(self.console.fileno()) if self.console.isatty() else ""
        print(f"{start}{printable(text)}", file=self.console, flush=True)

    def warn(self, notes: Iterable[str]) -> None:
        """Warn the user, on the console and in the log."""
        for note in notes:
            logger.warning(note)
