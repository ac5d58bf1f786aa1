"""The watchdog of a rank: it names who holds up a run, and ends a run that cannot continue."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from indictune.distributed import collectives, elastic
from indictune.progress import HERE
from indictune.supervise.heartbeat import Ranks

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
# Times the patience: before a collective gives up, which happens after two. NCCL then ends the process without a
# message (torch 2.13, where TORCH_NCCL_ASYNC_ERROR_HANDLING is not set).
_ENDS_AFTER = 1.8
# Longer than a rank waits for rank 0 to report a problem (20 s), so that launchers and gloo come first.
_ENDS_AFTER_ANOTHER_S = 30.0
_MEETINGS = (elastic.JOINING, collectives.NEW_GROUP, collectives.LONG_WAIT)  # phases that all ranks leave together


class Watchdog(threading.Thread):
    """Names the rank that the others wait for, and ends a run that cannot continue.

    When nothing moves for `patience_s`, it warns, names the late ranks, and writes this rank's stacks to its log. It
    ends the process in four cases, because NCCL waits in C++ where no signal handler and no exception arrives:

    - A rank died, and the main thread does not notice.
    - A rank ended, and this one waits for it, or held it up. The main thread is asked first.
    - A rank stays stopped.
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
        self.progress = HERE
        self.progress.passed("the start")  # imports took time on its clock
        self._reported_step, self._reported_at = 0, 0.0
        self._moves, self._moved_at = 0, 0.0
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
        self._look_for_ended_ranks()
        if still_s > _ENDS_AFTER * self.patience_s and (stopped := self.ranks.dead()):
            self.end("; ".join(stopped.values()))
        if still_s > self.patience_s / 4 and (moves := self.ranks.moves()) != self._moves:
            self._moves, self._moved_at = moves, now
        all_still_s = min(still_s, now - self._moved_at)
        if all_still_s < self.patience_s:
            self._warned_at_s = 0.0
            return
        if all_still_s - self._warned_at_s > self.patience_s:
            self._warn(all_still_s)
            self._warned_at_s = all_still_s
        if still_s > _ENDS_AFTER * self.patience_s and self._is_in_a_collective() and (late := self.waits_for()):
            self.end("; ".join(late.values()))

    def waits_for(self) -> dict[int, str]:
        """A sentence for each other rank that holds up this one."""
        late = self._late()
        return {} if self.ranks.rank in late else late

    def _late(self) -> dict[int, str]:
        """`Ranks.late`, once this rank has not moved for `patience_s`."""
        return self.ranks.late() if self.progress.still_s > self.patience_s else {}

    def _is_in_a_collective(self) -> bool:
        """Whether this rank waits where NCCL may end its process.

        Meetings use gloo, which raises an error or may wait for hours.
        """
        is_there = torch.distributed.is_initialized() and not self.ranks.has_ended
        return is_there and self.progress.place not in _MEETINGS

    def _look_for_ended_ranks(self) -> None:
        if self.ranks.gone():
            time.sleep(_GRACE_S)  # gloo reports the broken connection to the main thread
            gone = self.ranks.gone()  # without those that reported meanwhile
            if gone and not self.ranks.has_ended:
                self.end("; ".join([*self._own_lateness(), *gone.values()]))
        if (left := self._ended_rank()) and not self.ranks.has_ended:
            self.ask()
            time.sleep(_GRACE_S)  # the main thread clears up: compilers and their lock
            if not self.ranks.has_ended:
                rank, state, message = left
                mine = [each for each in self._own_lateness() if each not in message]
                self.end("; ".join([*mine, f"[rank {rank}] {message}"]), state)

    def _own_lateness(self) -> list[str]:
        """A sentence for this rank, if others may have ended while they waited for it."""
        late = self._late()
        return [late[self.ranks.rank]] if self.ranks.rank in late else []

    def _ended_rank(self) -> tuple[int, str, str] | None:
        """Rank, state and message of an ended rank that this one waits for, or that waited for this one."""
        still_s = self.progress.still_s
        if still_s > _GRACE_S and (not_begun := self.ranks.stopped_before_training()) is not None:
            return not_begun
        is_meeting = self.progress.place in _MEETINGS and still_s > _GRACE_S
        if not is_meeting and still_s < min(self.patience_s, _ENDS_AFTER_ANOTHER_S):
            return None
        left = self.ranks.first_end_of_launch()
        if left is None or is_meeting:
            return left
        # A stop request ends all ranks at one step; what one rank does after it may take a while.
        waits_long = left[1] in ("failed", "user_error") and still_s > _ENDS_AFTER_ANOTHER_S
        # A user error exists on this rank too, which may be about to report it.
        waited = left[1] == "failed" and self._own_lateness()
        return left if waits_long or waited else None

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
