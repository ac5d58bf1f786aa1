"""The supervision of a rank: its folder is locked, its output logged, and whoever holds it up is named."""

from __future__ import annotations

import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil
import torch

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe
from indictune.distributed import collectives, process_group
from indictune.errors import UserError
from indictune.file_locks import lock_run_folder, of_another_launch, wait_for_other_launch
from indictune.planning.hardware import killed_processes
from indictune.run import OWN_PROGRESS, Run
from indictune.supervise import run_folder
from indictune.supervise.heartbeat import Ranks
from indictune.supervise.run_folder import RankLog

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
# Times the patience: before a collective gives up, which happens after two. NCCL then ends the process without a
# message (torch 2.13, where TORCH_NCCL_ASYNC_ERROR_HANDLING is not set).
_ENDS_AFTER = 1.8
_ENDS_AFTER_ANOTHER_S = 10.0  # so that launchers and gloo come first
_MEETINGS = (process_group.JOINING, collectives.NEW_GROUP, collectives.LONG_WAIT)  # all ranks leave them together


class Watchdog(threading.Thread):
    """Names the rank that the others wait for, and ends a run that cannot continue.

    When nothing moves for `patience_s`, it warns, names the late ranks, and writes this rank's stacks to its log. It
    ends the process in four cases, because NCCL waits in C++ where no signal handler and no exception arrives:

    - A rank died, and the main thread does not notice.
    - A rank was stopped or failed, and this one does not move. The main thread is asked first.
    - A rank is paused by SIGSTOP.
    - This rank waits in a collective for a late rank.

    Without a collective, a late rank is only named: it may be reading rows, or waiting for its disk.

    Args:
        ranks: of the run.
        patience_s: without any progress.
        log: file of this rank.
        ask: asks the main thread to stop, if it has nothing to save.
        end: reports message and state (failed by default), and ends the process.

    Attributes:
        progress: of this rank.
    """

    def __init__(
        self, ranks: Ranks, patience_s: float, log: Path, ask: Callable[[], None], end: Callable[..., None]
    ) -> None:
        super().__init__(daemon=True, name="watchdog")
        self.ranks = ranks
        self.patience_s = patience_s
        self.log = log
        self.ask = ask
        self.end = end
        self.progress = OWN_PROGRESS
        self.progress.passed("the start")  # imports took time on its clock
        self._reported_step, self._reported_at = 0, 0.0
        self._warned_at_s = 0.0

    def run(self) -> None:
        with self.log.open("a", encoding="utf-8") as stacks:
            while True:
                # A main thread that holds the GIL blocks this thread.
                faulthandler.dump_traceback_later(self.patience_s, file=stacks)
                time.sleep(min(_LOOK_EVERY_S, self.patience_s / 4))
                self.look()

    def look(self) -> None:
        """Report the progress of this rank, and act if nothing moves."""
        here, still_s, now = self.progress, self.progress.still_s, time.monotonic()
        # A phase within a step matters only if a rank stays there, or another waits for it.
        if here.step != self._reported_step or max(still_s, now - self._reported_at) > self.patience_s / 4:
            self._reported_step, self._reported_at = here.step, now
            self.ranks.report_progress(here)
        self._look_for_ended_ranks(still_s)
        if still_s < self.patience_s:
            self._warned_at_s = 0.0
        elif still_s - self._warned_at_s > self.patience_s:
            self._warn(still_s)
            self._warned_at_s = still_s
        if still_s > _ENDS_AFTER * self.patience_s:
            late = self.ranks.dead() or (self.waits_for() if self._is_in_a_collective() else {})
            if late:
                self.end("; ".join(late.values()))

    def waits_for(self) -> dict[int, str]:
        """A sentence for each other rank that holds up this one, once it has not moved for `patience_s`."""
        late = self.ranks.late() if self.progress.still_s > self.patience_s else {}
        return {} if self.ranks.rank in late else late

    def _is_in_a_collective(self) -> bool:
        """Whether this rank waits where NCCL may end its process.

        Meetings use gloo, which raises an error or may wait for hours.
        """
        is_there = torch.distributed.is_initialized() and not self.ranks.has_ended
        return is_there and self.progress.place not in _MEETINGS

    def _look_for_ended_ranks(self, still_s: float) -> None:
        """End the process if another rank ended. The main thread mostly notices first, and clears up."""
        if self.ranks.gone():
            time.sleep(_GRACE_S)  # gloo reports the broken connection to the main thread
            gone = self.ranks.gone()  # without those that reported meanwhile
            if gone and not self.ranks.has_ended:
                self.end("; ".join(gone.values()))
        waits_s = _GRACE_S if self.progress.place in _MEETINGS else _ENDS_AFTER_ANOTHER_S
        if still_s > waits_s and (first := self.ranks.first_end()) and not self.ranks.has_ended:
            self.ask()
            time.sleep(_GRACE_S)
            if not self.ranks.has_ended:
                rank, state, message = first
                self.end(f"[rank {rank}] {message}", state)

    def _warn(self, still_s: float) -> None:
        none = f"no rank known to this node lags behind this one ({self.progress.place})"
        names = [*(self.ranks.dead() or self.ranks.late()).values()] or [none]
        logger.warning(
            "nothing has moved for %.0f s after step %d: %s. The log of each rank (%s) has its stack.",
            *(still_s // self.patience_s * self.patience_s, self.progress.step, "; ".join(names)),
            self.log.with_name("rank-*.log"),
        )
        with self.log.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)


run_logger = logging.getLogger("indictune")


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
        self._lock: object = None
        self._launch_name = process_group.launch_name(os.environ)  # now: accelerate (1.15) writes to the environment
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
                run_logger.addHandler(logging.NullHandler())  # else logging prints warnings, on every rank
            return
        try:
            self.output_dir.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: no other user writes
            tempfile.TemporaryFile(dir=self.output_dir).close()  # its lock may be writable all the same
            wait_for_other_launch(self.output_dir, self._launch_name, self.rank)
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
            raise UserError("folder-not-writable", flag, self.output_dir, reason=error.strerror) from error

    def lock_folder(self) -> None:
        self._lock = lock_run_folder(self.output_dir, self._launch_name)

    def _start_watchdog(self, log: Path) -> None:
        """A collective gives up after `--ddp_timeout`; half of that is long for anything."""
        timeout_s = unresolved(IndicTrainingArguments, self.recipe.values).ddp_timeout
        self.watchdog = Watchdog(self.ranks, max(1, timeout_s) / 2, log, self.stop_request.ask, self.end)
        self.watchdog.start()

    @property
    def owns_folder(self) -> bool:
        """Whether no other run writes to the folder, as far as this machine's kernel knows."""
        return of_another_launch(self.output_dir, self._launch_name) is None

    def reported(self) -> dict[str, str]:
        """`status.json`, if a rank reported since this process began that the run did not end well."""
        status = run_folder.status_since(self.output_dir, self.started) if self.is_named else {}
        return {} if status.get("state") == "ok" else status

    def lost(self) -> dict[int, str]:
        """A sentence for each other rank that this one waits for: it is dead or late."""
        late = {} if self.watchdog is None else self.watchdog.waits_for()
        return late | self.ranks.dead()
