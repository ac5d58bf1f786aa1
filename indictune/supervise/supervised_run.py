"""A run while it is supervised: its folder is locked, its output logged, its ranks watched."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TextIO

import psutil

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe
from indictune.distributed import elastic
from indictune.distributed.host_memory import killed_processes
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
        started: when this process began, in seconds since 1970. Reports from before are not of this run.
        killed_before: processes that the kernel had killed for lack of memory when the run began.
        watchdog: of this rank; None for one process, and before `open`.
        end: reports how the run ended, and ends the process, whatever its main thread does.
    """

    watchdog: Watchdog | None = None
    end: Callable[..., None]

    def __init__(self, recipe: Recipe, rank: int) -> None:
        super().__init__(recipe, rank)
        self._lock: TextIO | None = None
        self._launch_name = elastic.launch_name(os.environ)  # now: accelerate (1.15) writes to the environment
        self.killed_before = killed_processes()
        self.ranks = Ranks.of_launch(self.output_dir / "logs", os.environ)
        # psutil (7) may be a second early, and a lone process would take the report of the command before for its own.
        self.started = psutil.Process().create_time() if self.ranks.world_size > 1 else time.time()

    def open(self, replaceable: Collection[str]) -> None:
        """Lock the folder and start this rank's log, unless the recipe is refused already.

        Args:
            replaceable: files of an earlier command of this kind, which this one may overwrite.

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
            run_folder.check_free(self.output_dir, asked, replaceable)
        if self.recipe.problems:
            if self.rank != 0:
                logger.addHandler(logging.NullHandler())  # else logging prints warnings, on every rank
            return
        try:
            self.output_dir.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: no other user writes
            tempfile.TemporaryFile(dir=self.output_dir).close()  # its lock may be writable all the same
            lock.wait_for_other_launch(self.output_dir, self._launch_name, self.rank)
            if self.rank == 0:
                self.lock_folder()
                run_folder.check_free(self.output_dir, asked, replaceable)  # again, now that nobody else writes
                (self.output_dir / run_folder.STATUS).unlink(missing_ok=True)
            log = RankLog(self.output_dir, self.rank, self.recipe.values.get("verbose", False))
            self.results, self.console = log.results, log.console
            self.stop_request.report_to = log.descriptors
            self.ranks.begin()
            if self.ranks.world_size > 1:
                self._start_watchdog(log.path)
        except OSError as error:
            flag = "--output_dir"
            raise UserError("output-dir-not-writable", flag, self.output_dir, reason=error.strerror) from error

    def lock_folder(self) -> None:
        self._lock = lock.take(self.output_dir, self._launch_name)

    def _start_watchdog(self, log: Path) -> None:
        """A collective gives up after `--ddp_timeout`; half of that is long for anything."""
        timeout_s = unresolved(IndicTrainingArguments, self.recipe.values).ddp_timeout
        self.watchdog = Watchdog(self.ranks, max(1, timeout_s) / 2, log, self.stop_request.ask, self.end)
        self.watchdog.start()

    @property
    def owns_folder(self) -> bool:
        """Whether no other run writes to the folder, as far as this machine's kernel knows."""
        return lock.of_another_launch(self.output_dir, self._launch_name) is None

    def reported(self) -> dict[str, str]:
        """`status.json`, if a rank reported since this process began that the run did not end well."""
        status = run_folder.status_since(self.output_dir, self.started) if self.is_named else {}
        return {} if status.get("state") == "ok" else status

    def lost(self) -> dict[int, str]:
        """A sentence for each other rank that this one waits for: it is dead or late."""
        late = {} if self.watchdog is None else self.watchdog.waits_for()
        return late | self.ranks.dead()
