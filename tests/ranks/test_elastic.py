"""Nodes that come and go under torchrun: the run is the same as one that never changed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks.agents import SHORT_WAITS, Agents
from tests.ranks.launching import SCRIPT, Run, distance, free_port
from tests.ranks.test_parity import OF_METRICS, OF_THE_CHANGE, RELATIVE

STEPS = 30
STEPS_OF_EPOCH = 5
FLAGS = ("--max_steps", str(STEPS), "--save_steps", "3", "--save_total_limit", "30")

Elastic = Callable[..., Agents]


@pytest.fixture
def elastic(job: Path, tmp_path: Path) -> Iterator[Elastic]:
    """Makes the agents of a run with slow steps."""
    made: list[Agents] = []

    def make(*options: str, **variables: str) -> Agents:
        paced = ["tests/ranks/paced.py", "0.3", str(tmp_path / "rows.jsonl"), SCRIPT]
        flags = ["--config", str(job), *FLAGS, "--output_dir", str(tmp_path / "out")]
        made.append(Agents(tmp_path / "out", [*paced, *flags], options=options, variables=variables))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rows_by_step(path: Path) -> dict[int, Counter[str]]:
    """The rows of each step, as often as they were trained on by the processes that began last."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {}
    for step in {step for _, step, _ in lines}:
        last = max(began for began, of, _ in lines if of == step)
        of_step = [rows for began, of, rows in lines if of == step and began > last - 4]
        found[step] = Counter(json.dumps(row) for rows in of_step for row in rows)
    return found


def check_same_run(agents: Agents, unchanged: Run) -> None:
    """The curve and the weights are those of a run of one process, and each epoch has each row once."""
    assert agents.steps() == [*range(1, STEPS + 1)]
    changed = Run(agents.folder)
    for name in ("loss", "grad_norm"):
        assert changed.series(name) == pytest.approx(unchanged.series(name), rel=RELATIVE)
    assert changed.metrics["eval"]["loss"] == pytest.approx(unchanged.metrics["eval"]["loss"], abs=OF_METRICS)
    moved = distance(unchanged.weights, unchanged.weights_at(3))
    assert distance(changed.weights, unchanged.weights) < OF_THE_CHANGE * moved
    rows = rows_by_step(agents.folder.with_name("rows.jsonl"))
    epochs = [
        sum((rows[step] for step in range(first, first + STEPS_OF_EPOCH)), Counter[str]())
        for first in range(1, STEPS, STEPS_OF_EPOCH)
    ]
    assert [each.total() for each in epochs] == len(epochs) * [101]
    assert epochs == len(epochs) * [epochs[0]]


def last_step(agents: Agents) -> int:
    return max(agents.steps(), default=0)


@pytest.fixture
def unchanged(run_under: Callable[..., Run]) -> Run:
    return run_under("single", 1, *FLAGS)


@pytest.mark.slow
def test_agents_are_killed_and_come_back(elastic: Elastic, unchanged: Run) -> None:
    """24 rows divide by 1, 2 and 4 micro-batches of 6 rows, and not by 3: one of three processes idles."""
    agents = elastic()
    agents.start("a", "b", "c")
    agents.wait_for(lambda: last_step(agents) >= 4)
    assert "1 of 3 processes idle" in agents.output()
    agents.kill("a")  # with rank 0: the one that idled takes part
    agents.wait_for(lambda: last_step(agents) >= 8)
    agents.kill("b")
    agents.wait_for(lambda: last_step(agents) >= 12)
    agents.start("a", "b", "d")
    agents.wait_for(lambda: last_step(agents) >= 20)
    agents.kill("c")
    assert agents.wait_for_end() == {"a": 0, "b": 0, "d": 0}, agents.output()
    check_same_run(agents, unchanged)
    worlds = {world for world in range(1, 5) if f"ddp x {world}, and ddp" in agents.output()}
    assert worlds == {1, 2}


@pytest.mark.slow
def test_torchruns_own_store_serves_if_the_first_agent_stays(elastic: Elastic, unchanged: Run) -> None:
    """No agent can join then: torchrun (torch 2.13) gives it no address, and fails after a minute."""
    endpoint = f"127.0.0.1:{free_port()}"
    over_tcp = ("--rdzv-endpoint", endpoint, "--rdzv-conf", "last_call_timeout=4,keep_alive_interval=1")
    agents = elastic(*over_tcp, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    agents.start("a")
    time.sleep(2.0)  # so that this one serves the store
    agents.start("b")
    agents.wait_for(lambda: last_step(agents) >= 4)
    assert "No node can join" in agents.output()
    agents.kill("b")
    assert agents.wait_for_end() == {"a": 0}, agents.output()
    check_same_run(agents, unchanged)


@pytest.fixture
def etcd_endpoint(tmp_path: Path) -> Iterator[str]:
    """Of an etcd server with the interface of version 2, which torch uses."""
    pytest.importorskip("etcd", reason="there is no python-etcd")
    program = shutil.which("etcd")
    if program is None:
        pytest.skip("there is no etcd server")
    here, peers = (f"127.0.0.1:{free_port()}" for _ in range(2))
    of_clients = ["--listen-client-urls", f"http://{here}", "--advertise-client-urls", f"http://{here}"]
    of_peers = ["--listen-peer-urls", f"http://{peers}", "--data-dir", str(tmp_path / "etcd"), "--enable-v2"]
    log = (tmp_path / "etcd.log").open("wb")
    with log, subprocess.Popen([program, *of_clients, *of_peers], stdout=log, stderr=log) as server:
        yield here
        server.kill()


@pytest.mark.slow
def test_etcd_serves_and_any_agent_may_be_lost(elastic: Elastic, unchanged: Run, etcd_endpoint: str) -> None:
    over_etcd = ("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", etcd_endpoint, "--rdzv-conf", SHORT_WAITS)
    agents = elastic(*over_etcd)
    agents.start("a", "b")
    agents.wait_for(lambda: last_step(agents) >= 4)
    agents.kill("a")
    agents.wait_for(lambda: last_step(agents) >= 8)
    agents.start("c")
    assert agents.wait_for_end() == {"b": 0, "c": 0}, agents.output()
    check_same_run(agents, unchanged)


@pytest.mark.more
def test_an_agent_that_is_asked_to_stop_loses_no_step(elastic: Elastic, unchanged: Run) -> None:
    agents = elastic("--max-restarts", "2")
    agents.start("a", "b")
    agents.wait_for(lambda: last_step(agents) >= 4)
    agents.kill("a", signal.SIGTERM)
    agents.wait_for(lambda: last_step(agents) >= 12)
    agents.start("c")
    assert agents.wait_for_end() == {"b": 0, "c": 0}, agents.output()
    check_same_run(agents, unchanged)
    rows = agents.folder.with_name("rows.jsonl").read_text(encoding="utf-8").splitlines()
    starts = {(json.loads(line)[0], json.loads(line)[1]) for line in rows}
    assert len({step for _, step in starts}) == STEPS
