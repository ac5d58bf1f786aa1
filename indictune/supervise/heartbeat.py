"""Heartbeats: each rank writes its progress and its end to a file, because a dead rank answers no collective."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from indictune.distributed import launch, process_group
from indictune.files import write_whole
from indictune.run import Progress

logger = logging.getLogger(__name__)

_TOGETHER_S = 3.0
_GONE = "is gone: it was killed, or died without a word"
_STOPPED = "is stopped (SIGSTOP)"
_RUNNING = "is running"
_LATE = "holds up the others"


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
        rank: of this process.
        world_size: of the run.
        attempt: the name that its ranks share.
        all_here: whether all of them run on this node.
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
        rank, world_size = launch.rank_of(environ), launch.world_size_of(environ)
        all_here = launch.is_one_node(environ)
        return cls(logs, rank, world_size, process_group.attempt(environ), all_here)

    def begin(self) -> None:
        """Write the first heartbeat. Before this call the folder may belong to another run."""
        self._may_write = True
        self._write()

    def report_progress(self, progress: Progress) -> None:
        """Write how far this rank is."""
        here, mine = progress, self.mine
        if (here.step, here.count, here.place) != (mine.step, mine.count, mine.place):
            mine.step, mine.count, mine.place = here.step, here.count, here.place
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
        """Rank, state and message of the first other rank that did not end well.

        Args:
            wait_s: how long to wait for its report.
        """
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

    def gone(self) -> dict[int, str]:
        """A sentence for each rank of this launcher that is gone without a report."""
        return {rank: f"{_name(rank, each)} {_GONE}" for rank, each in self._in_state(_GONE).items()}

    def dead(self) -> dict[int, str]:
        """A sentence for each rank of this launcher that is stopped, or gone without a report."""
        stopped = self._in_state(_STOPPED)
        return self.gone() | {rank: f"{_name(rank, each)} {_STOPPED}" for rank, each in stopped.items()}

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


def _state_of(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return _GONE
    if state == psutil.STATUS_ZOMBIE:
        return _GONE
    return _STOPPED if state == psutil.STATUS_STOPPED else _RUNNING
