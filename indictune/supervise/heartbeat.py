"""What the ranks of a run tell each other through files, because a dead or stopped one answers no collective."""

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
from pathlib import Path
from typing import Any

import psutil
import torch

from indictune.distributed import elastic, launch, sharding
from indictune.progress import HERE, Progress
from indictune.supervise.run_folder import write_whole

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_END_WAIT_S = 2.0
_GRACE_S = 3.0
_TOGETHER_S = 3.0
# Times the patience: before a collective gives up, which it does after two. NCCL's ends its process then, without a
# word (torch 2.13, where TORCH_NCCL_ASYNC_ERROR_HANDLING is not set).
_ENDS_AFTER = 1.8
# Longer than a rank waits until rank 0 has told its problem (20 s), so that launchers and gloo come first.
_ENDS_AFTER_ANOTHER_S = 30.0
_MEETINGS = (elastic.JOINING, sharding.GROUPING, sharding.WAITING)  # where no rank goes on before all are there
_GONE = "is gone: it was killed, or died without a word"
_STOPPED = "is stopped (SIGSTOP)"


class Ranks:
    """The ranks of a run as their files tell.

    What an earlier attempt has left counts for nothing: files of another attempt's name, and those of this name that
    have not changed since this rank began, unless its process and this one began together. A launcher starts all
    ranks at once, a rank takes longer than that to import what it needs before it tells anything, and a file may be
    older than this rank where another was faster, and has failed.

    Args:
        logs: the run's folder of logs, which all ranks of a machine see.
        rank: of this process.
        world_size: of the run.
        attempt: its name, as far as its ranks share one (`elastic.attempt`).
        all_here: whether a launcher has started all of them on this machine (`launch.starts_all_here`).
    """

    def __init__(self, logs: Path, rank: int, world_size: int, attempt: str, all_here: bool = False) -> None:
        self.folder = logs / ".ranks"
        self.rank = rank
        self.world_size = world_size
        self.all_here = all_here
        self._telling = threading.Lock()
        self._may_tell = False
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
        """Those that a launcher tells of in the environment of each."""
        rank, world_size = launch.rank_of(environ), launch.world_size_of(environ)
        return cls(logs, rank, world_size, elastic.attempt(environ), launch.starts_all_here(environ))

    def begin(self) -> None:
        """Tell that this rank is there. Before, it tells nothing: the folder may be another run's."""
        self._may_tell = True
        self._tell()

    def at(self, progress: Progress) -> None:
        """Tell where this rank is."""
        here = {name: vars(progress)[name] for name in ("step", "count", "place", "moves")}
        if not here.items() <= self._mine.items():
            self._mine |= here
            self._tell()

    @property
    def has_ended(self) -> bool:
        """Whether this rank has told how it ended."""
        return self._mine["end"] is not None

    def ended(self, state: str, message: str, before_training: bool = False) -> None:
        """Tell how this rank ended, and whether it was asked to stop before its first step."""
        end = {"state": state, "message": message, "time": time.time(), "before_training": before_training}
        self._mine["end"] = end
        self._tell()

    def first_end(self) -> tuple[int, str, str] | None:
        """Rank, state and message of the rank that ended first, and not well, after a moment for it to tell."""
        deadline = time.time() + _END_WAIT_S
        while True:
            first = _first(self._others())
            if first is not None or time.time() > deadline:
                return first
            time.sleep(0.1)

    def untold(self) -> dict[int, str]:
        """A sentence for each rank of another machine that has not told how it ended."""
        there = {rank: each for rank, each in self._others().items() if each["host"] != self._mine["host"]}
        untold = {rank: _name(rank, each) for rank, each in there.items() if not each["end"]}
        return {rank: f"{name} has not told how it ended" for rank, name in untold.items()}

    def dead(self) -> dict[int, str]:
        """A sentence for each other rank of this machine that is stopped, or gone without telling how it ended."""
        here = self._mine["host"]
        states = {
            rank: (_name(rank, each), _state_of(each["pid"]))
            for rank, each in self._others().items()
            if each["host"] == here and not each["end"]
        } | self._unheard()
        return {rank: f"{name} {state}" for rank, (name, state) in states.items() if state != "running"}

    def late(self) -> dict[int, str]:
        """A sentence for each rank, this one too, that has not come as far as another and has not ended.

        Only where nothing moves any more: as long as this rank moves, it does not know how far the others are.
        """
        ranks = {self.rank: self._mine, **self._others()}
        furthest = max(each["count"] for each in ranks.values())
        return {
            rank: f"{_name(rank, each)} holds up the others: since step {each['step']} it came no further than "
            f"{each['place']}"
            for rank, each in ranks.items()
            if each["count"] < furthest and not each["end"]
        } | {
            rank: f"{name} holds up the others: it has not begun"
            for rank, (name, state) in self._unheard().items()
            if state == "running"
        }

    def moves(self) -> int:
        """Of all other ranks, as far as they have told: while one prepares rows, they grow (`Progress`)."""
        return sum(each["moves"] for each in self._others().values())

    def gone(self) -> dict[int, str]:
        """A sentence for each rank of the same launcher that is gone and has not told how it ended.

        Those that were asked to stop before they had begun, or were refused, have told it in `status.json` alone.
        """
        begun = {rank: (_name(rank, each), _GONE) for rank, each in self._beside(_GONE).items()}
        states = begun | self._unheard()
        return {rank: f"{name} {state}" for rank, (name, state) in states.items() if state.startswith(_GONE)}

    def kill_stopped(self) -> None:
        """End the ranks of the same launcher that are stopped: they hear no SIGTERM, so that it would wait for them,
        torch's for 30 s, before it does so itself."""
        for each in self._beside(_STOPPED).values():
            with suppress(psutil.Error):  # it has gone on, and ended
                psutil.Process(each["pid"]).kill()

    def _beside(self, state: str) -> dict[int, dict[str, Any]]:
        """What the ranks of the same launcher tell that are in a state, and have not told how they ended. Processes of
        another container may have this host's name; their numbers say nothing here."""
        here = self._mine["host"], self._mine["launcher"]
        return {
            rank: each
            for rank, each in self._others().items()
            if (each["host"], each["launcher"]) == here and not each["end"] and _state_of(each["pid"]) == state
        }

    def left(self) -> tuple[int, str, str] | None:
        """As `first_end`, now. Of a rank that was there before this one began an end tells nothing of this launch."""
        return _first(self._of_this_launch())

    def left_before_training(self) -> tuple[int, str, str] | None:
        """As `left`, of ranks that were asked to stop before their first step: no step can be taken without them."""
        told = self._of_this_launch().items()
        return _first({rank: each for rank, each in told if each["end"] and each["end"]["before_training"]})

    def _of_this_launch(self) -> dict[int, dict[str, Any]]:
        """As `_others`, without those that were there before this rank began, unless both began together."""
        before = {rank: told["pid"] for rank, told in self._before.items()}
        return {
            rank: told
            for rank, told in self._others().items()
            if told["pid"] != before.get(rank) or abs(told["born"] - self._mine["born"]) < _TOGETHER_S
        }

    def _unheard(self) -> dict[int, tuple[str, str]]:
        """Name and state of each other rank that has not begun, where all were started here."""
        unheard = set(range(self.world_size)) - {self.rank} - self._others().keys() if self.all_here else set()
        processes = self._processes() if unheard else {}
        if self.rank not in processes:  # what processes have been given is not to be seen here
            return {}
        host, gone = self._mine["host"], f"{_GONE}, before it had begun"
        return {
            rank: (_name(rank, {"pid": processes[rank], "host": host}), _state_of(processes[rank]))
            if rank in processes
            else (f"rank {rank}", gone)
            for rank in unheard
        }

    def _processes(self) -> dict[int, int]:
        """The process of each rank of this attempt that is there, begun or not, by what its launcher gave it."""
        all_processes = psutil.process_iter(["environ", "create_time"])
        there = {each: each.info["environ"] or {} for each in all_processes}  # nothing of another user's
        ours = [each for each in there if elastic.attempt(there[each]) == self._mine["attempt"]]
        ours.sort(key=lambda each: -each.info["create_time"])  # the first comes last: it starts others of its rank
        return {launch.rank_of(there[each]): each.pid for each in ours}

    def _others(self) -> dict[int, dict[str, Any]]:
        """What the other ranks of this attempt tell; those that have told nothing are left out."""
        return {
            rank: told
            for rank, told in self._read().items()
            if told != self._before.get(rank) or abs(told["born"] - self._mine["born"]) < _TOGETHER_S
        }

    def _read(self) -> dict[int, dict[str, Any]]:
        """What is told in this attempt's name."""
        found = {}
        for rank in set(range(self.world_size)) - {self.rank}:
            try:
                told = json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if told["attempt"] == self._mine["attempt"]:
                found[rank] = told
        return found

    def _tell(self) -> None:
        if not self._may_tell:
            return
        try:
            with self._telling:  # the watchdog tells too, and would replace the end by what it read before
                write_whole(self.folder / f"{self.rank}.json", json.dumps(self._mine))
        except OSError as error:  # a full disk must not end a run here
            logger.debug("%s: %s", self.folder, error)


def _first(told: Mapping[int, dict[str, Any]]) -> tuple[int, str, str] | None:
    """Rank, state and message of the one that ended first, and not well."""
    ends = {rank: each["end"] for rank, each in told.items() if each["end"] and each["end"]["state"] != "ok"}
    if not ends:
        return None
    # What the user gave is wrong of itself, whatever a clock of another machine says of the others' ends.
    rank = min(ends, key=lambda rank: (ends[rank]["state"] != "user_error", float(ends[rank]["time"])))
    return rank, str(ends[rank]["state"]), str(ends[rank]["message"])


def _name(rank: int, told: dict[str, Any]) -> str:
    return f"rank {rank} (process {told['pid']} on {told['host']})"


def _state_of(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return _GONE
    if state == psutil.STATUS_ZOMBIE:
        return _GONE
    return _STOPPED if state == psutil.STATUS_STOPPED else "running"


class Watchdog(threading.Thread):
    """Says who is missing when nothing has moved for long, and writes the stacks of this rank to its log.

    Where a rank has died and the main thread does not find out by itself, it ends the process: NCCL waits in C++,
    where no signal handler runs and no exception comes, until the launcher kills it, which knows of its own machine
    alone. So it does where a rank has ended that this one would meet first, or one has failed and this one stands
    still, or is the one that held it up, once it has asked the main thread in vain; where one stays stopped; and where
    this one waits in a collective for one that is late. Where there is no collective, that one is named again and
    again, and not ended: it may be fetching rows, or wait for a disk that comes back.

    Args:
        ranks: of the run.
        patience_s: without any progress.
        log: file of this rank.
        ask: ends the run where its main thread hears it, and has nothing to save.
        end: tells why the run has ended, and how, failed where it is not said; and ends the process.

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
        self.progress.passed("the start")  # its clock has run while this rank imported what it needs
        self._told_step, self._told_at = 0, 0.0
        self._moves, self._moved_at = 0, 0.0
        self._spoke_at_s = 0.0

    def run(self) -> None:
        with self.log.open("a", encoding="utf-8") as stacks:
            while True:
                # Of a main thread that holds the GIL, for then this one does not come to look.
                faulthandler.dump_traceback_later(self.patience_s, file=stacks)
                time.sleep(min(_LOOK_EVERY_S, self.patience_s / 4))
                self.look()

    def look(self) -> None:
        """Tell where this rank is, and do what there is to do where nothing moves."""
        here, still_s, now = self.progress, self.progress.still_s, time.monotonic()
        # A place within a step tells something only where a rank stays there, or another waits for it.
        if here.step != self._told_step or max(still_s, now - self._told_at) > self.patience_s / 4:
            self._told_step, self._told_at = here.step, now
            self.ranks.at(here)
        self._look_for_the_dead()
        if still_s > _ENDS_AFTER * self.patience_s and (stopped := self.ranks.dead()):
            self.end("; ".join(stopped.values()))
        if still_s > self.patience_s / 4 and (moves := self.ranks.moves()) != self._moves:
            self._moves, self._moved_at = moves, now
        all_still_s = min(still_s, now - self._moved_at)
        if all_still_s < self.patience_s:
            self._spoke_at_s = 0.0
            return
        if all_still_s - self._spoke_at_s > self.patience_s:
            self._speak(all_still_s)
            self._spoke_at_s = all_still_s
        if still_s > _ENDS_AFTER * self.patience_s and self._is_in_a_collective() and (late := self.waits_for()):
            self.end("; ".join(late.values()))

    def waits_for(self) -> dict[int, str]:
        """A sentence for each other rank that holds up this one, where that has not moved for long."""
        late = self._late()
        return {} if self.ranks.rank in late else late

    def _late(self) -> dict[int, str]:
        """As `Ranks.late`, where this rank has not moved for long."""
        return self.ranks.late() if self.progress.still_s > self.patience_s else {}

    def _is_in_a_collective(self) -> bool:
        """Whether this rank, if it waits, does so where NCCL may end it. gloo makes groups, which raises an error or
        waits for hours; and what comes before that may take hours too."""
        is_there = torch.distributed.is_initialized() and not self.ranks.has_ended
        return is_there and self.progress.place not in _MEETINGS

    def _look_for_the_dead(self) -> None:
        if self.ranks.gone():
            time.sleep(_GRACE_S)  # gloo tells the main thread at once that the connection is broken
            gone = self.ranks.gone()  # but for those that were just about to tell their end
            if gone and not self.ranks.has_ended:
                self.end("; ".join([*self._if_late(), *gone.values()]))
        if (left := self._left_alone_by()) and not self.ranks.has_ended:
            self.ask()
            time.sleep(_GRACE_S)  # a main thread that hears it clears away what it has begun: compilers, their lock
            if not self.ranks.has_ended:
                rank, state, message = left
                mine = [each for each in self._if_late() if each not in message]
                self.end("; ".join([*mine, f"[rank {rank}] {message}"]), state)

    def _if_late(self) -> list[str]:
        """A sentence for this rank, where others may have ended of waiting for it."""
        late = self._late()
        return [late[self.ranks.rank]] if self.ranks.rank in late else []

    def _left_alone_by(self) -> tuple[int, str, str] | None:
        """Rank, state and message of the one that has ended, where this one waits for it in vain, or it for this."""
        still_s = self.progress.still_s
        if still_s > _GRACE_S and (never_began := self.ranks.left_before_training()) is not None:
            return never_began
        is_meeting = self.progress.place in _MEETINGS and still_s > _GRACE_S
        if not is_meeting and still_s < min(self.patience_s, _ENDS_AFTER_ANOTHER_S):
            return None
        left = self.ranks.left()
        if left is None or is_meeting:
            return left
        # A request to stop ends all at one step; what a rank does after it, alone, may take a while.
        in_vain = left[1] in ("failed", "user_error") and still_s > _ENDS_AFTER_ANOTHER_S
        # What the user gave is wrong here too, and this rank may be about to tell it.
        waited = left[1] == "failed" and self._if_late()
        return left if in_vain or waited else None

    def _speak(self, still_s: float) -> None:
        none = f"no rank that this machine hears of lags behind this one ({self.progress.place})"
        names = [*(self.ranks.dead() or self.ranks.late()).values()] or [none]
        logger.warning(
            "nothing has moved for %.0f s after step %d: %s. The log of each rank (%s) has its stack.",
            *(still_s // self.patience_s * self.patience_s, self.progress.step, "; ".join(names)),
            self.log.with_name("rank-*.log"),
        )
        with self.log.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
