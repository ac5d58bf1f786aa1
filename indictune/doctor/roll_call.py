"""A roll of the ranks at the store of their launch. It names those that do not come, with their stacks.

A collective that hangs waits in C++, and no rank can ask another one by a collective. So each rank writes to the store
where it is before it waits, and a thread of each rank watches the wait, by a connection of its own.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from socket import gethostname
from typing import NamedTuple, TypeVar

import psutil
import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from indictune.distributed import elastic
from indictune.distributed.launch import rank_of, world_size_of
from indictune.doctor.check_lines import Outcome
from indictune.stop_signals import OF_SCHEDULERS, Stopped

_T = TypeVar("_T")

_LOOK_EVERY_S = 0.1
_STACKS_S = 3.0  # how long the others have to give their stacks
_FRAMES = 8  # of a stack, from the innermost
_ENDS_S = 3.0  # how long a rank waits for the others to read
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_CURE_OF_NETWORK = (
    "Check the network between the nodes: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, the firewall. NCCL_DEBUG=INFO shows "
    "what NCCL does."
)
_STATES = {
    psutil.STATUS_STOPPED: ("stopped", "Look for Ctrl-Z, a debugger, or a scheduler that suspends jobs."),
    psutil.STATUS_DISK_SLEEP: ("waiting for a disk", "Check its mounts: a network file system does not answer."),
}
_GONE = "gone", "Look at what it printed last, and in dmesg: the kernel ends processes when memory is short."


class Place(NamedTuple):
    """Where a rank is. All ranks come to the same places in the same order."""

    number: int  # of the places it came to
    name: str  # of the last one
    pid: int
    host: str


class AbsentError(Exception):
    """Ranks did not come. The lines name them."""

    def __init__(self, lines: list[Outcome]) -> None:
        super().__init__(lines)
        self.lines = lines


class RollCall:
    """The ranks of a launch, as the store shows them. One process needs no store.

    After `timeout_s` in a wait, `report` gets the lines that name who is absent, on one rank that waits, from another
    thread than the main one. The process ends after it.

    Raises:
        DistError: nobody serves the store.
    """

    def __init__(self, environ: Mapping[str, str], timeout_s: float, report: Callable[[list[Outcome]], None]) -> None:
        self.rank, self.world_size, self.timeout_s = rank_of(environ), world_size_of(environ), timeout_s
        self._report = report
        self._place = Place(0, "the start", os.getpid(), gethostname())
        self._since = 0.0  # of the wait; 0 for none
        self._limit_s = timeout_s
        self._is_over = threading.Event()
        if self.world_size > 1:
            self._main = threading.main_thread().ident
            self._store, self._own = (_connect(environ, 2 * timeout_s, is_first) for is_first in (True, False))
            self._arrive("the start")
            self._watcher = threading.Thread(target=self._watch, name="roll call", daemon=True)
            self._watcher.start()

    @contextmanager
    def at(self, place: str, longer: float = 1.0) -> Iterator[None]:
        """A named block in which this rank waits for all others, some times longer than the timeout.

        Raises:
            AbsentError: a rank is gone, and so the wait failed.
        """
        if self.world_size == 1:
            yield
            return
        self._limit_s = longer * self.timeout_s
        self._arrive(place)
        self._since = time.monotonic()
        try:
            yield
        except (RuntimeError, DistError, Stopped) as error:  # a peer is gone, and the launcher may have noticed first
            ignore_stops()
            waited = f"in {time.monotonic() - self._since:.0f} s"
            self._since = 0.0  # else the watch reports too
            if not isinstance(error, Stopped):  # its first sentence, without the place in the C++ code of gloo
                reason = re.sub(r"^\[/.*?\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
                waited = f"and the wait failed ({reason})"
            raise AbsentError(self._absent(waited) if self._claims() else []) from error
        finally:
            self._since = 0.0

    def exchange(self, name: str, mine: _T, longer: float = 1.0) -> list[_T]:
        """What each rank has, by rank. All ranks must call it, each time with another name. It passes through JSON."""
        if self.world_size == 1:
            return [json.loads(json.dumps(mine))]
        with self.at(name, longer):
            self._store.set(f"{name}/{self.rank}", json.dumps(mine))
            keys = [f"{name}/{rank}" for rank in range(self.world_size)]
            for key in keys:
                self._wait(key)
            return [json.loads(self._store.get(key)) for key in keys]

    def end(self) -> None:
        """Let the others read before this process, which may hold the store, ends. All ranks must call it.

        Rank 0 calls it when it has printed: a launcher ends all ranks when the first has ended with another code than
        0.
        """
        if self.world_size == 1:
            return
        deadline = time.monotonic() + _ENDS_S
        with suppress(DistError):
            if self.rank == 0:
                self._store.set("printed", "")
            self._wait("printed", deadline)
            self._store.set(f"left/{self.rank}", "")
            for rank in range(self.world_size if self.rank == 0 else 0):
                self._wait(f"left/{rank}", deadline)

    def close(self) -> None:
        """Stop the watch. A thread that still talks to the store aborts the process when python ends (torch 2.13)."""
        self._is_over.set()
        if self.world_size > 1:
            self._watcher.join(_ENDS_S)

    def give_up(self, has_printed: bool) -> None:
        """End the other ranks, which may wait for ever, when one has printed who is absent."""
        with suppress(DistError):
            if has_printed:
                self._store.set("reported", "")
                time.sleep(3 * _LOOK_EVERY_S)
            else:
                time.sleep(_STACKS_S + _ENDS_S)  # the watch ends this process before

    def _wait(self, key: str, until: float = math.inf) -> None:
        """Wait in Python, where a signal can interrupt it."""
        while not self._store.check([key]) and time.monotonic() < until:
            time.sleep(0.01)

    def _arrive(self, name: str) -> None:
        self._place = self._place._replace(number=self._place.number + 1, name=name)
        self._store.set(f"at/{self.rank}", json.dumps(self._place))

    def _watch(self) -> None:
        given = False
        with suppress(DistError):  # rank 0 has ended, and with it the store
            while not self._is_over.wait(_LOOK_EVERY_S):
                if not given and self._own.check(["wanted"]):
                    given = True
                    self._own.set(f"stack/{self.rank}", json.dumps(self._stack()))
                if self._own.check(["reported"]):
                    os._exit(1)
                since = self._since
                if since and time.monotonic() - since > self._limit_s and self._claims():
                    self._report(self._absent(f"in {self._limit_s:.0f} s"))
                    self._own.set("reported", "")
                    time.sleep(2 * _LOOK_EVERY_S)
                    os._exit(1)

    def _claims(self) -> bool:
        """Whether this thread of this rank is the one that reports. The other may see the ranks end meanwhile."""
        mine = f"{self.rank} {threading.get_ident()}"
        return bool(self._own.compare_set("reporter", "", mine) == mine.encode())

    def _stack(self) -> list[str]:
        """What the main thread of this rank does, innermost call last."""
        frames = traceback.extract_stack(sys._current_frames()[self._main or 0])[-_FRAMES:]
        return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames]

    def _absent(self, waited: str) -> list[Outcome]:
        """A line for each rank that is behind this one, or elsewhere than in the wait, with its stack."""
        here = self._place
        stacks = self._stacks()
        places = {rank: self._of(rank) for rank in range(self.world_size)}
        behind = {rank: place for rank, place in places.items() if place is None or place.number < here.number}
        if behind:
            found = dict.fromkeys(behind, "did not arrive")
        else:  # it came, and does something else than to wait
            found = dict.fromkeys(outside_torch(stacks), "arrived, and does not take part")
            found |= dict.fromkeys(places.keys() - stacks.keys(), "arrived, and does not answer")
        lines = [self._line(rank, places[rank], f"{what} {waited}", stacks.get(rank)) for rank, what in found.items()]
        if lines:
            return lines
        all_came = f"all {self.world_size} ranks came to it, and it did not end {waited}"
        return [Outcome(here.name, "fail", all_came, _CURE_OF_NETWORK, tuple(stacks.get(self.rank, ())))]

    def _stacks(self) -> dict[int, list[str]]:
        self._own.set("wanted", "")
        deadline, found = time.monotonic() + _STACKS_S, {self.rank: self._stack()}
        while len(found) < self.world_size and time.monotonic() < deadline:
            for rank in range(self.world_size):
                if rank not in found and self._own.check([f"stack/{rank}"]):
                    found[rank] = json.loads(self._own.get(f"stack/{rank}"))
            time.sleep(_LOOK_EVERY_S)
        return found

    def _line(self, rank: int, place: Place | None, what: str, stack: list[str] | None) -> Outcome:
        check = self._place.name
        if place is None:
            cure = "Look at what its launcher printed, and whether all nodes were started."
            return Outcome(check, "fail", f"rank {rank} did not start: it {what}", cure)
        found = f"rank {rank} (process {place.pid} on {place.host}) {what}."
        found += f" The last place that it came to: {place.name}."
        if stack is None:
            state, cure = why_silent(place.pid, place.host)
            return Outcome(check, "fail", f"{found} It gave no stack: its process is {state}.", cure)
        cure = "The last line of the stack is what holds it up."
        return Outcome(check, "fail", f"{found} Its stack:", cure, tuple(stack))

    def _of(self, rank: int) -> Place | None:
        return Place(*json.loads(self._own.get(f"at/{rank}"))) if self._own.check([f"at/{rank}"]) else None


def ignore_stops() -> None:
    """Ignore the signal that a launcher sends to all ranks when the first has ended: this one has to say why."""
    for number in OF_SCHEDULERS:
        signal.signal(number, signal.SIG_IGN)


def outside_torch(stacks: Mapping[int, Sequence[str]]) -> list[int]:
    """The ranks that are outside torch, if others are in it: these wait."""
    outside = [rank for rank, stack in stacks.items() if not stack or _TORCH not in stack[-1]]
    return outside if len(outside) < len(stacks) else []


def _connect(environ: Mapping[str, str], timeout_s: float, is_first: bool) -> Store:
    """A connection to the store of the launch. Rank 0 serves it where the launcher does not.

    The group of the run then uses the same server. Unlike `rendezvous`, it does not wait for all ranks to connect.

    Raises:
        DistError: nobody serves it.
    """
    by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = is_first and rank_of(environ) == 0 and not by_launcher
    address, timeout = (environ["MASTER_ADDR"], int(environ["MASTER_PORT"])), timedelta(seconds=timeout_s)
    store = TCPStore(*address, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    return PrefixStore(f"doctor/{elastic.attempt(environ)}", store)


def why_silent(pid: int, host: str) -> tuple[str, str]:
    """What a process is that gives no stack, and the cure. Of another node nothing is known."""
    look = f"On {host}, type: ps -o stat= -p {pid}. T is stopped, D waits for a disk."
    if host != gethostname():
        return "stopped, gone, or busy outside Python", look
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return _GONE
    return _GONE if state == psutil.STATUS_ZOMBIE else _STATES.get(state, ("busy outside Python", look))
