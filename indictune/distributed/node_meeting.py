"""Meetings of the ranks of several nodes before the process group is up, at the store of their launch.

A process group waits in C++, where no signal arrives, and says little of a node that does not come. Here ranks poll.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from indictune.config.plan import Launch
from indictune.distributed import agreement, process_group
from indictune.distributed.agreement import RankDifference, Values
from indictune.distributed.launch import is_one_node, rank_of
from indictune.errors import Problem, problem
from indictune.progress import OWN_PROGRESS

_REFUSED = "refused"
_LONGEST_PAUSE_S = 0.5
_STRAGGLERS_S = 10.0  # how long a meeting that has found a difference waits for more
_FAREWELL_S = 1.0  # how long a rank that ends lets the others read why: its launcher may hold the store
_CONNECTED: list[Store] = []  # one at most. It is kept: without a store of the launcher, rank 0 serves it


def meet(
    place: str, values: Callable[[], Values], launch: Launch, environ: Mapping[str, str], timeout_s: float
) -> list[Problem]:
    """Wait for the ranks of all nodes, and compare their values. All ranks must call it; on one node it does nothing.

    Args:
        place: name of the meeting.
        values: gives those of this rank that all must have alike.
        launch: of this rank.
        environ: of this process.
        timeout_s: after which the meeting ends without those that did not come; the process group waits for them next.

    Returns:
        What differs from rank 0, on which rank and host; or why another rank cannot run. The same on all ranks.
    """
    if is_one_node(environ):
        return []
    OWN_PROGRESS.passed(f"meeting the other nodes {place}")
    try:
        return _Meeting(_store(environ, timeout_s), place, launch).hold(values(), timeout_s)
    except DistError as error:
        return [unreachable(environ, error)]


def unreachable(environ: Mapping[str, str], error: DistError) -> Problem:
    """The problem of a launch whose store this node does not reach."""
    where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    return problem("first-node-unreachable", "MASTER_ADDR", where, reason=str(error).partition("\n")[0])


def leave(environ: Mapping[str, str], message: str) -> None:
    """Tell the ranks of other nodes, which may wait at a meeting, why this one cannot run."""
    if is_one_node(environ):
        return
    may_wait = process_group.limit(environ) or environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if may_wait and not _CONNECTED:
        return  # all other ranks would have to come
    with suppress(DistError):
        store = _store(environ, _STRAGGLERS_S)
        store.compare_set(_REFUSED, "", json.dumps([rank_of(environ), agreement.host(), message]))
        time.sleep(_FAREWELL_S)


def _store(environ: Mapping[str, str], timeout_s: float) -> Store:
    """The store of this start, the same object each time."""
    if not _CONNECTED:
        timeout = timedelta(seconds=timeout_s)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        name = process_group.attempt(environ)
        if process_group.limit(environ):  # torchrun may start a run again in the same store, with other nodes
            name = process_group.agree_on_name(store, rank, world_size, timeout)
        _CONNECTED.append(PrefixStore(f"indictune/{name}", store))
    return _CONNECTED[0]


class _Meeting:
    """One meeting of all ranks of a launch."""

    def __init__(self, store: Store, place: str, launch: Launch) -> None:
        self.store = PrefixStore(place, store)
        self.of_launch = store
        self.launch = launch

    def hold(self, own: Values, timeout_s: float) -> list[Problem]:
        deadline = time.monotonic() + timeout_s
        mine = agreement.short_values(own)
        if self.launch.rank == 0:
            self.store.set("expected", json.dumps([agreement.host(), mine]))
        if not self._wait_for("expected", deadline):
            return self._refusal()
        host_of_0, expected = json.loads(self.store.get("expected"))
        found = agreement.differences(self.launch.rank, agreement.host(), mine, expected)
        for each in found:
            self.store.set(f"difference-{self.store.add('differences', 1)}", json.dumps(each))
        if found:
            self.store.set("differs", "")
        if self.store.add("arrived", 1) == self.launch.world_size:
            self.store.set("complete", "")
        has_come = self._wait_for("complete", deadline)
        return agreement.rank_problems(self._differences(), host_of_0) or ([] if has_come else self._refusal())

    def _wait_for(self, key: str, deadline: float) -> bool:
        """Whether a key is there in time, and before a rank refuses to run."""
        pause = 0.01
        while not self.store.check([key]):
            if self.of_launch.check([_REFUSED]) or time.monotonic() > deadline:
                return False
            if self.store.check(["differs"]):
                deadline = min(deadline, time.monotonic() + _STRAGGLERS_S)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _differences(self) -> list[RankDifference]:
        count = self.store.add("differences", 0)
        return [RankDifference(*json.loads(self.store.get(f"difference-{number + 1}"))) for number in range(count)]

    def _refusal(self) -> list[Problem]:
        if not self.of_launch.check([_REFUSED]):
            return []
        rank, host, message = json.loads(self.of_launch.get(_REFUSED))
        return [problem("other-node-refused", value=" ".join(message.split()), rank=rank, host=host)]
