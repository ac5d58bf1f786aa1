"""What the ranks of a run tell each other through files, because a dead or stopped one answers no collective."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.training.output import write_whole

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_END_WAIT_S = 2.0
_GRACE_S = 3.0
_GONE = "is gone: it was killed, or died without a word"


class Ranks:
    """The ranks of a run as their files tell.

    Args:
        logs: the run's folder of logs, which all ranks of a machine see.
        rank: of this process.
        world_size: of the run.
        attempt: told apart from others by this; what ranks of another have left counts for nothing.
    """

    def __init__(self, logs: Path, rank: int, world_size: int, attempt: str) -> None:
        self.folder = logs / ".ranks"
        self.rank = rank
        self.world_size = world_size
        self.started = time.time()
        self._telling = threading.Lock()
        self._mine: dict[str, Any] = {
            "attempt": attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "launcher": os.getppid(),
            "step": 0,
            "end": None,
        }
        self._tell()

    def at_step(self, step: int) -> None:
        """Tell where this rank is."""
        if step != self._mine["step"]:
            self._mine["step"] = step
            self._tell()

    @property
    def has_ended(self) -> bool:
        """Whether this rank has told how it ended."""
        return self._mine["end"] is not None

    def ended(self, state: str, message: str) -> None:
        """Tell how this rank ended."""
        self._mine["end"] = {"state": state, "message": message, "time": time.time()}
        self._tell()

    def first_end(self) -> tuple[int, str, str] | None:
        """Rank, state and message of the rank that ended first, and not well, after a moment for it to tell."""
        deadline = time.time() + _END_WAIT_S
        while True:
            ends = {rank: each["end"] for rank, each in self._others().items() if each["end"]}
            ends = {rank: end for rank, end in ends.items() if end["state"] != "ok" and end["time"] >= self.started}
            if ends or time.time() > deadline:
                break
            time.sleep(0.1)
        if not ends:
            return None
        rank = min(ends, key=lambda rank: float(ends[rank]["time"]))
        return rank, str(ends[rank]["state"]), str(ends[rank]["message"])

    def missing(self) -> list[str]:
        """A sentence for each rank of this machine that is gone, is stopped, or lags behind this one."""
        found = []
        for rank, each in self._others().items():
            state = _state_of(each["pid"]) if each["host"] == self._mine["host"] else "running"
            if state != "running":
                found.append(f"{_name(rank, each)} {state}")
            elif each["step"] < self._mine["step"]:
                found.append(f"{_name(rank, each)} is still at step {each['step']}")
        return found

    def gone(self) -> list[str]:
        """A sentence for each rank of the same launcher that is gone and has not told how it ended."""
        found = []
        for rank, each in self._others().items():
            # Else the file may be what an earlier run with the same port has left.
            is_beside_this = (each["host"], each.get("launcher")) == (self._mine["host"], self._mine["launcher"])
            if is_beside_this and not each["end"] and _state_of(each["pid"]) == _GONE:
                found.append(f"{_name(rank, each)} {_GONE}")
        return found

    def _others(self) -> dict[int, dict[str, Any]]:
        """What the other ranks tell; those that have told nothing are left out."""
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
        try:
            with self._telling:  # the watchdog tells too, and would replace the end by what it read before
                write_whole(self.folder / f"{self.rank}.json", json.dumps(self._mine))
        except OSError as error:  # a full disk must not end a run here
            logger.debug("%s: %s", self.folder, error)


def _name(rank: int, told: dict[str, Any]) -> str:
    return f"rank {rank} (process {told['pid']} on {told['host']})"


def _state_of(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return _GONE
    if state == psutil.STATUS_ZOMBIE:
        return _GONE
    return "is stopped (SIGSTOP)" if state == psutil.STATUS_STOPPED else "running"


class Watchdog(threading.Thread):
    """Says who is missing when nothing has moved for long, and writes the stacks of this rank to its log.

    Where a rank has died and the main thread does not find out by itself, it ends the process: NCCL waits in C++,
    where no signal handler runs and no exception comes, until the launcher kills it.

    Args:
        ranks: of the run.
        patience_s: without any progress.
        log: file of this rank.
        end: tells why the run has failed, and ends the process.
    """

    def __init__(self, ranks: Ranks, patience_s: float, log: Path, end: Callable[[str], None]) -> None:
        super().__init__(daemon=True, name="watchdog")
        self.ranks = ranks
        self.patience_s = patience_s
        self.log = log
        self.end = end
        self.step = 0
        self._last = time.monotonic()

    def progress(self, step: int) -> None:
        """Something has moved."""
        self.step = step
        self._last = time.monotonic()

    def run(self) -> None:
        while True:
            time.sleep(min(_LOOK_EVERY_S, self.patience_s / 4))
            self.ranks.at_step(self.step)
            self._look_for_the_dead()
            if time.monotonic() - self._last > self.patience_s:
                self._speak()
                self._last = time.monotonic()

    def _look_for_the_dead(self) -> None:
        if self.ranks.gone():
            time.sleep(_GRACE_S)  # gloo tells the main thread at once that the connection is broken
            gone = self.ranks.gone()  # but for those that were just about to tell their end
            if gone and not self.ranks.has_ended:
                self.end("; ".join(gone))

    def _speak(self) -> None:
        missing = self.ranks.missing() or ["no rank of this machine lags behind"]
        logger.warning(
            "nothing has moved for %.0f s after step %d: %s", self.patience_s, self.step, "; ".join(missing)
        )
        with self.log.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)


class Progress(TrainerCallback):
    """Tells the watchdog that something has moved.

    Args:
        watchdog: of this rank.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def _moved(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.watchdog.progress(state.global_step)

    on_step_end = on_substep_end = on_prediction_step = on_save = _moved
