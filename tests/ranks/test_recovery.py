"""The benchmark of recovery, on one kill: a node is lost with its memory, and another one takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recovery import SNAPSHOT_STEPS, measure, summary


@pytest.mark.more
def test_a_killed_node_costs_the_steps_since_the_last_snapshot(tmp_path: Path) -> None:
    kills = measure(tmp_path / "run", kills=1, snapshot_steps=SNAPSHOT_STEPS)
    found = summary(kills)
    assert found["median"] == found["worst"] == kills[0]
    assert kills[0]["seconds"] > 0
    assert 1 <= kills[0]["steps_lost"] <= SNAPSHOT_STEPS + 1
