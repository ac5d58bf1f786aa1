"""A run while it is supervised: its folder is locked, its output logged, its ranks watched."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TextIO

from indictune.checkpoint import disk_errors
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe
from indictune.distributed import elastic
from indictune.errors import UserError
from indictune.run import Run
from indictune.supervise import lock, run_folder
from indictune.supervise.heartbeat import Ranks
from indictune.supervise.logs import RankLog
from indictune.supervise.watchdog import Watchdog

logger = logging.getLogger("indictune")


class SupervisedRun(Run):
    """A run with its lock, log and watchdog.

    Attributes:
        ranks: of the run.
        watchdog: of this rank; None where there is one process, or nothing is trained.
        end: reports why and how the run ended, and ends the process, whatever its main thread does.
    """

    watchdog: Watchdog | None = None
    end: Callable[..., None]

    def __init__(self, recipe: Recipe, rank: int) -> None:
        super().__init__(recipe, rank)
        self._lock: TextIO | None = None
        self._launch_name = elastic.launch_name(os.environ)  # now: accelerate (1.15) writes to the environment
        self.ranks = Ranks.of_launch(self.output_dir / "logs", os.environ)

    def open(self, replaceable: Collection[str]) -> None:
        """Take the folder and start this rank's log, unless the recipe is refused already.

        Args:
            replaceable: files that an earlier command of this kind left, and this one may replace.

        Raises:
            UserError: another run writes to the folder, it cannot be written to, or the recipe file cannot be read:
                what it does not say is not missing.
        """
        if not self.recipe.is_read:
            self.recipe.problems.raise_any()
        asked = self.recipe.values.get("resume_from_checkpoint")
        with self.recipe.problems.collecting():
            if not self.is_named and not replaceable:  # such a command has a folder of its own
                raise UserError("output-dir-missing", "--output_dir")
            run_folder.check_folder(self.output_dir)
            self._check_free(asked, replaceable)
        if self.recipe.problems:
            if self.rank != 0:
                logger.addHandler(logging.NullHandler())  # else logging prints warnings, on every rank
            return
        try:
            self.output_dir.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: no other user writes
            run_folder.check_takes_files(self.output_dir)
            if self.rank == 0:
                self._lock = lock.held(self.output_dir, self._launch_name)
                run_folder.check_free(self.output_dir, asked, replaceable)  # again, now that nobody else writes
                run_folder.forget_status(self.output_dir)
            else:
                lock.wait_for_own_launch(self.output_dir, self._launch_name)
            log = RankLog(self.output_dir, self.rank, self.recipe.values.get("verbose", False))
            self.results, self.console = log.results, log.console
            self.stop_request.report_to = log.descriptors
            self.ranks.begin()
            if self.ranks.world_size > 1:
                self._start_watchdog(log.path)
        except OSError as error:
            raise disk_errors.refused(self.output_dir, error) from error

    def _check_free(self, asked: str | None, replaceable: Collection[str]) -> None:
        """`run_folder.check_free`; but while another process writes there, to resume is no way out."""
        try:
            run_folder.check_free(self.output_dir, asked, replaceable)
        except UserError:
            if self.rank == 0:
                lock.check_free(self.output_dir)
            raise

    def _start_watchdog(self, log: Path) -> None:
        """A collective gives up after `--ddp_timeout`; half of that is long for anything."""
        timeout_s = unresolved(IndicTrainingArguments, self.recipe.values).ddp_timeout
        self.watchdog = Watchdog(self.ranks, max(1, timeout_s) / 2, log, self.stop_request.ask, self.end)
        self.watchdog.start()

    @property
    def owns_folder(self) -> bool:
        """Whether no other run writes to the folder, as far as this machine's kernel can tell."""
        if self.rank != 0:
            return lock.of_another_launch(self.output_dir, self._launch_name) is None
        return self._lock is not None or lock.is_free(self.output_dir)
