"""Which ranks of an elastic run train, and how the ranks of one start find each other in a store of earlier ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from indictune.config.plan import Launch
from indictune.distributed.elastic import World, attempt, choose_world
from indictune.distributed.process_group import agree_on_name, join
from indictune.errors import UserError
from indictune.planning.machine_failures import explain_failure
from tests.plans import plan_of
from tests.ranks.launching import free_port


def environment(rank: int, world_size: int, here: int = 1, restarts: str = "3") -> dict[str, str]:
    """Of a rank on a node of `here` processes."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % here),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(here),
        "TORCHELASTIC_MAX_RESTARTS": restarts,
    }


@pytest.mark.parametrize(("started", "used"), [(1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (9, 8)])
def test_as_many_processes_train_as_the_global_batch_divides_by(started: int, used: int) -> None:
    environ = environment(0, started)
    assert choose_world(environ, rows=64, rows_at_once=8) == World(started, used)
    assert environ["WORLD_SIZE"] == str(used)


def test_part_of_a_node_may_idle() -> None:
    """Two nodes of 3: of 6 processes 4 are used, 3 of the first node and 1 of the second."""
    environs = [environment(rank, 6, here=3) for rank in range(6)]
    assert {choose_world(each, rows=16, rows_at_once=4) for each in environs} == {World(6, 4)}
    assert [each["LOCAL_WORLD_SIZE"] for each in environs] == ["3", "3", "3", "1", "1", "1"]


def test_whole_groups_of_ranks_train() -> None:
    """Two processes hold one model: of 7, three groups could train, and 16 rows divide by two."""
    tensor = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    assert choose_world({**environment(0, 7), **tensor}, rows=16, rows_at_once=4) == World(7, 4)
    assert choose_world(environment(0, 4), 16, 8, deepspeed="ds_configs/zero1_tp.json") == World(4, 4)


def test_other_launches_keep_their_processes() -> None:
    fixed = environment(0, 3, restarts="0")
    assert choose_world(fixed, rows=64, rows_at_once=8) == World(3, 3)
    assert choose_world({}, rows=64, rows_at_once=8) == World(1, 1)
    assert choose_world(environment(0, 3), rows=64, rows_at_once=None) == World(3, 3)  # --max_tokens_per_device
    assert choose_world(environment(0, 3), rows=10, rows_at_once=4) == World(3, 3)  # nothing divides: it is refused


def test_the_user_learns_of_idle_processes_and_of_nodes_that_cannot_join() -> None:
    (idle,) = World(3, 2).notes({}, 64, 8)
    assert "1 of 3" in idle
    assert "64" in idle
    two_nodes = {**environment(0, 2), "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    (store,) = World(2, 2).notes(two_nodes, 64, 8)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in store
    assert World(2, 2).notes({**two_nodes, "TORCHELASTIC_USE_AGENT_STORE": "False"}, 64, 8) == []
    assert World(2, 2).notes({**two_nodes, "TORCHELASTIC_MAX_RESTARTS": "0"}, 64, 8) == []


def test_the_ranks_of_a_start_agree_whatever_earlier_ones_left() -> None:
    store, timeout = HashStore(), timedelta(seconds=20)
    store.set("asks/1", "a dead process")
    store.set("asks/2", "another one")
    store.set("answer/a dead process", "of an earlier start")
    names: list[str] = []
    for size in (3, 2, 4):
        with ThreadPoolExecutor(size) as ranks:
            of_start = set(ranks.map(lambda rank, size=size: agree_on_name(store, rank, size, timeout), range(size)))
        assert len(of_start) == 1
        names += of_start
    assert len(set(names)) == 3


def test_ranks_that_are_elsewhere_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that keep the address of a lost first node send their ranks to a store where rank 0 never comes."""
    environ = {**environment(1, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    store = TCPStore("127.0.0.1", int(environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    for name, value in {**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") as refused:
        join(environ, "gloo", timeout_s=1)
    assert refused.value.code == "ranks-not-found"
    del store


def test_an_attempt_on_several_nodes_has_one_name_whatever_each_node_counts() -> None:
    one, other = (
        {**environment(rank, 2), "TORCHELASTIC_RESTART_COUNT": count} for rank, count in ((0, "0"), (1, "4"))
    )
    assert attempt(one) == attempt(other)
    first, second = ({**environment(0, 1), "TORCHELASTIC_RESTART_COUNT": count} for count in "01")
    assert attempt(first) != attempt(second)


def test_the_loss_of_another_nodes_rank_is_named() -> None:
    error = RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.2]:15775. This is typically ...")
    of_two_nodes, of_one = (plan_of(launch=Launch("ddp", 2, here), environ=environment(0, 2)) for here in (1, 2))
    assert "[rank-of-other-node-lost]" in str(explain_failure(error, of_two_nodes, 0))
    assert explain_failure(error, of_one, 0) is None  # its dead rank is named
    assert explain_failure(error, None, 0) is None
