"""Each rank writes its heartbeat to a file, because a dead one answers no collective; a watchdog names who is late."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from indictune.distributed import collectives, elastic, launch, process_group
from indictune.files import write_whole
from indictune.run import OWN_PROGRESS, Progress

logger = logging.getLogger(__name__)

_TOGETHER_S = 3.0
_GONE = "is gone: it was killed, or died without a word"
_STOPPED = "is stopped (SIGSTOP)"
_LATE = "holds up the others"
_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
# Times the patience: before a collective gives up, which happens after two. NCCL then ends the process without a
# message (torch 2.13, where TORCH_NCCL_ASYNC_ERROR_HANDLING is not set).
_ENDS_AFTER = 1.8
_ENDS_AFTER_ANOTHER_S = 10.0  # so that launchers and gloo come first
_MEETINGS = (process_group.JOINING, collectives.NEW_GROUP, collectives.LONG_WAIT)  # all ranks leave them together


@dataclass
class Heartbeat:
    """Who a rank is, how far it is (as in `Progress`), and how it ended.

    Attributes:
        attempt: the name that the ranks of one start share (`elastic.attempt`).
        born: when its process began, in seconds since 1970.
        launcher: its parent process.
        state: how it ended; empty while it runs.
    """

    attempt: str
    pid: int
    born: float
    host: str
    launcher: int
    step: int = 0
    count: int = 0
    place: str = "the start"
    state: str = ""
    message: str = ""
    ended_at: float = 0.0


class Ranks:
    """The ranks of a run, as their heartbeat files show them.

    Files of an earlier attempt are stale and ignored: files with another attempt's name, and files that have not
    changed since this rank began. A file of a process that began together with this one is never stale: a launcher
    starts all ranks at once, and a faster rank may have failed already.

    Args:
        logs: the run's folder of logs, which all ranks of a node share.
        all_here: whether all ranks run on this node.
    """

    def __init__(self, logs: Path, rank: int, world_size: int, attempt: str, all_here: bool = False) -> None:
        self.folder = logs / ".ranks"
        self.rank = rank
        self.world_size = world_size
        self.all_here = all_here
        born = psutil.Process().create_time()
        self.mine = Heartbeat(attempt, os.getpid(), born, socket.gethostname(), os.getppid())
        self._writing = threading.Lock()
        self._may_write = False
        self._before = self._read()

    @classmethod
    def of_launch(cls, logs: Path, environ: Mapping[str, str]) -> Ranks:
        """The ranks of a launch, by the environment variables of the launcher."""
        sizes, all_here = (launch.rank_of(environ), launch.world_size_of(environ)), launch.is_one_node(environ)
        return cls(logs, *sizes, elastic.attempt(environ), all_here)

    def begin(self) -> None:
        """Write the first heartbeat. Before this call the folder may belong to another run."""
        self._may_write = True
        self._write()

    def report_progress(self, progress: Progress) -> None:
        """Write how far this rank is."""
        here, mine = (progress.step, progress.count, progress.place), self.mine
        if here != (mine.step, mine.count, mine.place):
            mine.step, mine.count, mine.place = here
            self._write()

    @property
    def has_ended(self) -> bool:
        """Whether this rank reported its end."""
        return bool(self.mine.state)

    def report_end(self, state: str, message: str) -> None:
        """Write how this rank ended."""
        self.mine.message, self.mine.ended_at, self.mine.state = message, time.time(), state
        self._write()

    def first_end(self, wait_s: float = 0.0) -> tuple[int, str, str] | None:
        """Rank, state and message of the first other rank that did not end well; its report is waited for."""
        deadline = time.monotonic() + wait_s
        while True:
            ended = {rank: each for rank, each in self._others().items() if each.state not in ("", "ok")}
            if ended:
                # A user error is a cause by itself. Clocks of other machines decide only between the others.
                rank = min(ended, key=lambda rank: (ended[rank].state != "user_error", ended[rank].ended_at))
                return rank, ended[rank].state, ended[rank].message
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)

    def gone(self, state: str = _GONE) -> dict[int, str]:
        """A sentence for each rank of this launcher that is gone, or in another state, without a report."""
        return {rank: f"{_name(rank, each)} {state}" for rank, each in self._in_state(state).items()}

    def gone_before(self) -> dict[int, str]:
        """A sentence for each rank that is gone and had not begun, if one launcher started all ranks here.

        The launcher then sends SIGTERM to the others, as if it was asked to stop.
        """
        missing = set(range(self.world_size)) - {self.rank} - self._others().keys() if self.all_here else set()
        alive = _ranks_started_by(self.mine.launcher, self.mine.attempt) if missing else set()
        known = self.rank in alive  # else nothing is known of the launcher's processes
        return {rank: f"rank {rank} {_GONE}, before it had begun" for rank in missing - alive if known}

    def dead(self) -> dict[int, str]:
        """A sentence for each rank of this launcher that is stopped, or gone without a report."""
        return self.gone() | self.gone(_STOPPED)

    def kill_stopped(self) -> None:
        """Kill the stopped ranks of this launcher.

        A stopped process gets no SIGTERM. The launcher would wait for it (torchrun 30 s) before it kills it.
        """
        for each in self._in_state(_STOPPED).values():
            with suppress(psutil.Error):  # it continued, and ended
                psutil.Process(each.pid).kill()

    def late(self) -> dict[int, str]:
        """A sentence for each rank, this one included, that is behind another and has not ended.

        It holds only while no rank makes progress: the files of the others lag behind them.
        """
        ranks = {self.rank: self.mine, **self._others()}
        furthest = max(each.count for each in ranks.values())
        late = {
            rank: f"{_name(rank, each)} {_LATE}: since step {each.step} it got no further than {each.place}"
            for rank, each in ranks.items()
            if each.count < furthest and not each.state
        }
        missing = set(range(self.world_size)) - ranks.keys() if self.all_here else set()
        return late | {rank: f"rank {rank} {_LATE}: it has not begun" for rank in missing}

    def _in_state(self, state: str) -> dict[int, Heartbeat]:
        """Other ranks of this launcher whose process is in a state, and that did not report their end.

        Processes of another container may have this host's name, but their process ids mean nothing here.
        """
        here = self.mine.host, self.mine.launcher
        return {
            rank: each
            for rank, each in self._others().items()
            if (each.host, each.launcher) == here and not each.state and _state_of(each.pid) == state
        }

    def _others(self) -> dict[int, Heartbeat]:
        """The heartbeats of the other ranks of this attempt, without stale ones."""
        return {
            rank: each
            for rank, each in self._read().items()
            if each != self._before.get(rank) or abs(each.born - self.mine.born) < _TOGETHER_S
        }

    def _read(self) -> dict[int, Heartbeat]:
        """The heartbeats with this attempt's name."""
        found = {}
        for rank in set(range(self.world_size)) - {self.rank}:
            with suppress(OSError, ValueError, TypeError):  # there is none, or another version wrote it
                each = Heartbeat(**json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8")))
                if each.attempt == self.mine.attempt:
                    found[rank] = each
        return found

    def _write(self) -> None:
        if not self._may_write:
            return
        try:
            with self._writing:  # the watchdog writes too, and must not overwrite the end
                write_whole(self.folder / f"{self.rank}.json", json.dumps(asdict(self.mine)))
        except OSError as error:  # a full disk must not end a run
            logger.debug("%s: %s", self.folder, error)


def _name(rank: int, each: Heartbeat) -> str:
    return f"rank {rank} (process {each.pid} on {each.host})"


def _state_of(pid: int) -> str | None:
    try:
        return {psutil.STATUS_ZOMBIE: _GONE, psutil.STATUS_STOPPED: _STOPPED}.get(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return _GONE


def _ranks_started_by(launcher: int, attempt: str) -> set[int]:
    """The ranks of an attempt whose processes live, by what a launcher gave them."""
    found = set()
    with suppress(psutil.Error):
        for each in psutil.Process(launcher).children():
            with suppress(psutil.Error):  # it has ended
                environ = each.environ() if each.status() != psutil.STATUS_ZOMBIE else {}
                if "RANK" in environ and elastic.attempt(environ) == attempt:
                    found.add(launch.rank_of(environ))
    return found


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
        log: file of this rank.
        ask: asks the main thread to stop, if it has nothing to save.
        end: reports message and state (failed by default), and ends the process.
    """

    def __init__(
        self, ranks: Ranks, patience_s: float, log: Path, ask: Callable[[], None], end: Callable[..., None]
    ) -> None:
        super().__init__(daemon=True, name="watchdog")
        self.ranks, self.patience_s, self.log, self.ask, self.end = ranks, patience_s, log, ask, end
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
            # NCCL may end the process. Meetings use gloo, which raises an error or may wait for hours.
            may_hang = torch.distributed.is_initialized() and here.place not in _MEETINGS and not self.ranks.has_ended
            if late := self.ranks.dead() or (self.waits_for() if may_hang else {}):
                self.end("; ".join(late.values()))

    def waits_for(self) -> dict[int, str]:
        """A sentence for each other rank that holds up this one, once it has not moved for `patience_s`."""
        late = self.ranks.late() if self.progress.still_s > self.patience_s else {}
        return {} if self.ranks.rank in late else late

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
