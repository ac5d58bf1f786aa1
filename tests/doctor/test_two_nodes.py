"""Doctor on two nodes of one machine: their own network, address and host name, two torchrun agents."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.doctor.test_planted import SCRIPT
from tests.ranks.nodes import on_nodes
from tests.ranks.test_nodes import MEETING, torchrun


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "folders", "disks"),
    [
        ("", ("out", "out"), "all nodes see the same files"),
        ("", ("out", "other"), "each node has its own disk, and keeps a copy"),
        ("1:never_arrives", ("out", "out"), ""),
    ],
)
def test_two_nodes_are_examined_within_a_minute(
    tmp_path: Path, fault: str, folders: tuple[str, str], disks: str
) -> None:
    flags = ["--config", "recipes/sentiment/demo.yaml", "--output_dir"]
    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
    commands = [
        [*torchrun(node, *MEETING), SCRIPT, *fault.split(), "doctor", *flags, str(tmp_path / name)]
        for node, name in enumerate(folders)
    ]
    began = time.monotonic()
    ended = on_nodes(tmp_path / "nodes", commands)
    assert time.monotonic() - began < 60
    assert [each.code for each in ended] == [1 if fault else 0] * 2, ended
    said = "".join(each.said for each in ended)
    if fault:
        assert "rank 1 (process " in said
        assert " on node1) did not arrive in 15 s" in said
    else:
        assert "2 process(es) on 2 node(s)" in said
        assert f"shared disk     {disks}" in said
        assert "ranks 0, 1 on node0, node1, " in said
        assert "of the network (" in said
