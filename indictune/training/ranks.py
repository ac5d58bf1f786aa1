"""What the ranks of a run tell each other through files, because a dead or stopped one answers no collective."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.training.output import write_whole

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_END_WAIT_S = 2.0


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
            "step": 0,
            "end": None,
        }
        self._tell()

    def at_step(self, step: int) -> None:
        """Tell where this rank is."""
        if step != self._mine["step"]:
            self._mine["step"] = step
            self._tell()

    def ended(self, state: str, message: str) -> None:
        """Tell how this rank ended, unless it went well."""
        self._mine["end"] = {"state": state, "message": message, "time": time.time()}
        self._tell()

    def first_end(self) -> tuple[int, str, str] | None:
        """Rank, state and message of the rank that ended first in this run, after a moment for it to tell."""
        deadline = time.time() + _END_WAIT_S
        while True:
            ends = {rank: each["end"] for rank, each in self._others().items() if each["end"]}
            ends = {rank: end for rank, end in ends.items() if end["time"] >= self.started}
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
            name = f"rank {rank} (process {each['pid']} on {each['host']})"
            state = _state_of(each["pid"]) if each["host"] == self._mine["host"] else "running"
            if state != "running":
                found.append(f"{name} {state}")
            elif each["step"] < self._mine["step"]:
                found.append(f"{name} is still at step {each['step']}")
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


def _state_of(pid: int) -> str:
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "is gone: it was killed, or died without a word"
    if state == psutil.STATUS_ZOMBIE:
        return "is gone: it was killed, or died without a word"
    return "is stopped (SIGSTOP)" if state == psutil.STATUS_STOPPED else "running"


class Watchdog(threading.Thread):
    """Says who is missing when nothing has moved for long, and writes the stacks of this rank to its log.

    Args:
        ranks: of the run.
        patience_s: without any progress.
        log: file of this rank.
    """

    def __init__(self, ranks: Ranks, patience_s: float, log: Path) -> None:
        super().__init__(daemon=True, name="watchdog")
        self.ranks = ranks
        self.patience_s = patience_s
        self.log = log
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
            if time.monotonic() - self._last > self.patience_s:
                self._speak()
                self._last = time.monotonic()

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
