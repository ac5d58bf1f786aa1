"""Snapshots on several nodes, each with its own memory: a lost node's part comes from its neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from indictune.checkpoint import store
from tests.ranks.agents import OWN_MEMORY, Agents
from tests.ranks.launching import SCRIPT, Run
from tests.ranks.test_elastic import last_step
from tests.ranks.test_parity import RELATIVE

FLAGS = ("--max_steps", "12", "--save_steps", "12")
SNAPSHOTS = ("--snapshot_steps", "2")
# Both nodes' copies to the disk, before torchrun starts them again.
SLOW_DISK = "+".join(f"SLOW@indictune.checkpoint.save:copy_snapshot:1@{rank}@0" for rank in range(2))


@pytest.fixture
def agents(job: Path, tmp_path: Path) -> Iterator[Agents]:
    out = tmp_path / "out"
    paced = ["tests/faults/faulty.py", SLOW_DISK, "tests/ranks/paced.py", "0.2", str(tmp_path / "rows.jsonl"), SCRIPT]
    flags = ["--config", str(job), *FLAGS, *SNAPSHOTS, "--output_dir", str(out)]
    fsdp2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    made = Agents(out, [*paced, *flags], before=OWN_MEMORY, variables=fsdp2)
    yield made
    made.close()


@pytest.mark.more
def test_a_lost_nodes_part_comes_from_its_neighbour(agents: Agents, run_under: Callable[..., Run]) -> None:
    agents.start("a", "b")
    agents.wait_for(lambda: last_step(agents) >= 5)
    agents.kill("b")
    assert store.checkpoints_in(agents.folder) == []
    assert agents.wait_for_end() == {"a": 0}, agents.output()
    assert "comes from a snapshot in memory" in agents.output()
    unchanged = run_under("single", 1, *FLAGS)
    assert Run(agents.folder).series("loss") == pytest.approx(unchanged.series("loss"), rel=RELATIVE)
