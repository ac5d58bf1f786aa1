"""Ranks of several nodes meet before the process group is up. Here each rank is a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import TCPStore

from indictune.config.plan import Launch
from indictune.distributed import agreement
from indictune.distributed.agreement import agree, tell_other_nodes
from indictune.errors import Problem
from tests.ranks.launching import free_port

Values = Mapping[str, object]
Met = list[list[Problem]]


def environment(rank: int, ranks: int) -> dict[str, str]:
    sizes = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
    return {**sizes, "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """That of a launcher."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(agreement, "_CONNECTED", [])
    variables = {**environment(0, 3), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return served


def met(*each: Values, timeout_s: float = 30.0, late_s: float = 0.0, ranks: int | None = None) -> Met:
    """What each rank hears at a meeting. The last one is late."""
    number = ranks or len(each)

    def attend(rank: int) -> list[Problem]:
        time.sleep(late_s if rank == len(each) - 1 else 0)
        launch = Launch("ddp", number, 1, rank)
        return agree("here", lambda: each[rank], launch, environment(rank, number), timeout_s)

    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(attend, range(len(each))))


@pytest.mark.usefixtures("store")
def test_ranks_that_are_alike_go_on_together() -> None:
    started = time.monotonic()
    assert met({"x": 1}, {"x": 1}, {"x": 1}, late_s=0.5) == [[], [], []]
    assert time.monotonic() - started >= 0.5


@pytest.mark.usefixtures("store")
def test_all_ranks_hear_of_all_differences() -> None:
    found = met({"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 1, "y": 3}, late_s=0.5)
    assert found[0] == found[1] == found[2]
    named = [(each.code, each.flag, each.value, each.details["ranks"], each.details["expected"]) for each in found[0]]
    assert named == [("ranks-differ", "x", "2", "rank 1", "1"), ("ranks-differ", "y", "3", "rank 2", "1")]


@pytest.mark.usefixtures("store")
def test_a_rank_that_cannot_run_tells_the_others_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_FAREWELL_S", 0.0)
    tell_other_nodes(environment(1, 2), "2 problems:\n  1. no such file")
    ((found,),) = met({"x": 1}, ranks=2)
    assert (found.code, found.details["rank"]) == ("other-node-refused", 1)
    assert found.value == "2 problems: 1. no such file"


@pytest.mark.usefixtures("store")
def test_a_meeting_does_not_wait_for_ever() -> None:
    assert met({"x": 1}, timeout_s=0.2, ranks=2) == [[]]


@pytest.mark.more
def test_a_store_that_nobody_serves_is_named(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_PORT", str(port))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (found,) = agree("here", dict, Launch("ddp", 2, 1, 1), environment(1, 2) | address, timeout_s=1.0)
    assert (found.code, found.flag, found.value) == ("first-node-unreachable", "MASTER_ADDR", f"127.0.0.1:{port}")


def test_ranks_of_one_node_do_not_meet() -> None:
    values: Callable[[], Values] = lambda: pytest.fail("asked")  # noqa: E731
    assert agree("here", values, Launch("ddp", 2, 2), {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 1.0) == []
    tell_other_nodes({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "")
