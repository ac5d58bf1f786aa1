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
from pathlib import Path
from typing import Any

import psutil

from indictune.distributed import elastic, launch
from indictune.files import write_whole
from indictune.progress import Progress

logger = logging.getLogger(__name__)

_END_WAIT_S = 2.0
_TOGETHER_S = 3.0
_GONE = "is gone: it was killed, or died without a word"
_STOPPED = "is stopped (SIGSTOP)"


class Ranks:
    """The ranks of a run, as their heartbeat files show them.

    Files of an earlier attempt are stale and ignored: files with another attempt's name, and files that have not
    changed since this rank began. A file of a process that began together with this one is never stale: a launcher
    starts all ranks at once, and a faster rank may have failed already.

    Args:
        logs: the run's folder of logs, which all ranks of a node share.
        rank: of this process.
        world_size: of the run.
        attempt: the name that its ranks share (`elastic.attempt`).
        all_here: whether a launcher started all of them on this node (`launch.starts_all_here`).
    """

    def __init__(self, logs: Path, rank: int, world_size: int, attempt: str, all_here: bool = False) -> None:
        self.folder = logs / ".ranks"
        self.rank = rank
        self.world_size = world_size
        self.all_here = all_here
        self._writing = threading.Lock()
        self._may_write = False
        self._mine: dict[str, Any] = {
            "attempt": attempt,
            "pid": os.getpid(),
            "born": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "launcher": os.getppid(),
            "step": 0,
            "count": 0,
            "place": "the start",
            "moves": 0,
            "end": None,
        }
        self._before = self._read()

    @classmethod
    def of_launch(cls, logs: Path, environ: Mapping[str, str]) -> Ranks:
        """The ranks of a launch, by the environment variables of the launcher."""
        rank, world_size = launch.rank_of(environ), launch.world_size_of(environ)
        return cls(logs, rank, world_size, elastic.attempt(environ), launch.starts_all_here(environ))

    def begin(self) -> None:
        """Write the first heartbeat. Before this call the folder may belong to another run."""
        self._may_write = True
        self._write()

    def report_progress(self, progress: Progress) -> None:
        """Write how far this rank is."""
        here = {name: vars(progress)[name] for name in ("step", "count", "place", "moves")}
        if not here.items() <= self._mine.items():
            self._mine |= here
            self._write()

    @property
    def has_ended(self) -> bool:
        """Whether this rank reported its end."""
        return self._mine["end"] is not None

    def report_end(self, state: str, message: str, before_training: bool = False) -> None:
        """Write how this rank ended, and whether it was asked to stop before its first step."""
        end = {"state": state, "message": message, "time": time.time(), "before_training": before_training}
        self._mine["end"] = end
        self._write()

    def first_end(self) -> tuple[int, str, str] | None:
        """Rank, state and message of the first rank that did not end well. Waits two seconds for its report."""
        deadline = time.time() + _END_WAIT_S
        while True:
            first = _first(self._others())
            if first is not None or time.time() > deadline:
                return first
            time.sleep(0.1)

    def without_end(self) -> dict[int, str]:
        """A sentence for each rank of another node that did not report its end."""
        here = self._mine["host"]
        return {
            rank: f"{_name(rank, each)} did not report its end"
            for rank, each in self._others().items()
            if each["host"] != here and not each["end"]
        }

    def dead(self) -> dict[int, str]:
        """A sentence for each other rank of this node that is stopped, or gone without a report."""
        here = self._mine["host"]
        states = {
            rank: (_name(rank, each), _state_of(each["pid"]))
            for rank, each in self._others().items()
            if each["host"] == here and not each["end"]
        } | self._not_begun()
        return {rank: f"{name} {state}" for rank, (name, state) in states.items() if state != "running"}

    def late(self) -> dict[int, str]:
        """A sentence for each rank, this one included, that is behind another and has not ended.

        It holds only while no rank makes progress: the files of the others lag behind them.
        """
        ranks = {self.rank: self._mine, **self._others()}
        furthest = max(each["count"] for each in ranks.values())
        return {
            rank: f"{_name(rank, each)} holds up the others: since step {each['step']} it got no further than "
            f"{each['place']}"
            for rank, each in ranks.items()
            if each["count"] < furthest and not each["end"]
        } | {
            rank: f"{name} holds up the others: it has not begun"
            for rank, (name, state) in self._not_begun().items()
            if state == "running"
        }

    def moves(self) -> int:
        """Work units of all other ranks (`Progress.moves`). They grow while a rank prepares rows."""
        return sum(each["moves"] for each in self._others().values())

    def gone(self) -> dict[int, str]:
        """A sentence for each rank of the same launcher that is gone without a report.

        A rank that was stopped or refused before it began reports only in `status.json`.
        """
        begun = {rank: (_name(rank, each), _GONE) for rank, each in self._in_state(_GONE).items()}
        states = begun | self._not_begun()
        return {rank: f"{name} {state}" for rank, (name, state) in states.items() if state.startswith(_GONE)}

    def kill_stopped(self) -> None:
        """Kill the stopped ranks of the same launcher.

        A stopped process gets no SIGTERM. The launcher would wait for it (torchrun 30 s) before it kills it.
        """
        for each in self._in_state(_STOPPED).values():
            with suppress(psutil.Error):  # it continued, and ended
                psutil.Process(each["pid"]).kill()

    def _in_state(self, state: str) -> dict[int, dict[str, Any]]:
        """Ranks of the same launcher whose process is in a state, and that did not report their end.

        Processes of another container may have this host's name, but their process ids mean nothing here.
        """
        here = self._mine["host"], self._mine["launcher"]
        return {
            rank: each
            for rank, each in self._others().items()
            if (each["host"], each["launcher"]) == here and not each["end"] and _state_of(each["pid"]) == state
        }

    def first_end_of_launch(self) -> tuple[int, str, str] | None:
        """As `first_end`, without waiting, and without ranks of an earlier launch."""
        return _first(self._of_this_launch())

    def stopped_before_training(self) -> tuple[int, str, str] | None:
        """As `first_end_of_launch`, of ranks that were stopped before their first step: all others wait for them."""
        heartbeats = self._of_this_launch().items()
        return _first({rank: each for rank, each in heartbeats if each["end"] and each["end"]["before_training"]})

    def _of_this_launch(self) -> dict[int, dict[str, Any]]:
        """As `_others`, without processes that wrote before this rank began, unless both began together."""
        before = {rank: heartbeat["pid"] for rank, heartbeat in self._before.items()}
        return {
            rank: heartbeat
            for rank, heartbeat in self._others().items()
            if heartbeat["pid"] != before.get(rank) or abs(heartbeat["born"] - self._mine["born"]) < _TOGETHER_S
        }

    def _not_begun(self) -> dict[int, tuple[str, str]]:
        """Name and state of each other rank without a heartbeat, if all were started on this node."""
        missing = set(range(self.world_size)) - {self.rank} - self._others().keys() if self.all_here else set()
        processes = self._processes() if missing else {}
        if self.rank not in processes:  # the environments of processes are hidden here
            return {}
        host, gone = self._mine["host"], f"{_GONE}, before it had begun"
        return {
            rank: (_name(rank, {"pid": processes[rank], "host": host}), _state_of(processes[rank]))
            if rank in processes
            else (f"rank {rank}", gone)
            for rank in missing
        }

    def _processes(self) -> dict[int, int]:
        """The process of each rank of this attempt, found by its environment variables."""
        all_processes = psutil.process_iter(["environ", "create_time"])
        there = {each: each.info["environ"] or {} for each in all_processes}  # other users' are hidden
        ours = [each for each in there if elastic.attempt(there[each]) == self._mine["attempt"]]
        ours.sort(key=lambda each: -each.info["create_time"])  # the first comes last: it starts others of its rank
        return {launch.rank_of(there[each]): each.pid for each in ours}

    def _others(self) -> dict[int, dict[str, Any]]:
        """The heartbeats of the other ranks of this attempt, without stale ones."""
        return {
            rank: heartbeat
            for rank, heartbeat in self._read().items()
            if heartbeat != self._before.get(rank) or abs(heartbeat["born"] - self._mine["born"]) < _TOGETHER_S
        }

    def _read(self) -> dict[int, dict[str, Any]]:
        """The heartbeats with this attempt's name."""
        found = {}
        for rank in set(range(self.world_size)) - {self.rank}:
            try:
                heartbeat = json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if heartbeat["attempt"] == self._mine["attempt"]:
                found[rank] = heartbeat
        return found

    def _write(self) -> None:
        if not self._may_write:
            return
        try:
            with self._writing:  # the watchdog writes too, and must not overwrite the end
                write_whole(self.folder / f"{self.rank}.json", json.dumps(self._mine))
        except OSError as error:  # a full disk must not end a run
            logger.debug("%s: %s", self.folder, error)


def _first(heartbeats: Mapping[int, dict[str, Any]]) -> tuple[int, str, str] | None:
    """Rank, state and message of the first that did not end well."""
    ends = {rank: each["end"] for rank, each in heartbeats.items() if each["end"] and each["end"]["state"] != "ok"}
    if not ends:
        return None
    # A user error is a cause by itself; the clocks of other machines decide only between the others.
    rank = min(ends, key=lambda rank: (ends[rank]["state"] != "user_error", float(ends[rank]["time"])))
    return rank, str(ends[rank]["state"]), str(ends[rank]["message"])


def _name(rank: int, heartbeat: dict[str, Any]) -> str:
    return f"rank {rank} (process {heartbeat['pid']} on {heartbeat['host']})"


def _state_of(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return _GONE
    if state == psutil.STATUS_ZOMBIE:
        return _GONE
    return _STOPPED if state == psutil.STATUS_STOPPED else "running"
