"""Start commands on several nodes of one machine, which have their own network, address and host name."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.ranks.launching import ROOT, path, python

FIRST = "10.77.0.1"  # the address of the first node
_NEW = ("--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# gloo asks for the address of the host's name. `eth0` is the network that the nodes share.
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "eth0"}


class Ended(NamedTuple):
    """How a node's command ended."""

    code: int
    said: str


@functools.cache
def why_not() -> str:
    """Why this machine has no nodes; empty if it has."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "there is no unshare or no ip"
    links = "ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    probe = f"{links} && hostname x && mount --bind /etc /etc"
    asked = ["unshare", *_NEW, "--uts", "bash", "-c", probe]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"


def on_nodes(
    folder: Path, commands: list[list[str]], variables: dict[int, dict[str, str]] | None = None, nodes: int = 2
) -> list[Ended]:
    """Run a command on each of the first nodes, all at once, from the repository's root.

    Node i has the address 10.77.0.(i + 1) and the name `node<i>`. Its programs `ssh` and `pdsh` reach the others.

    Args:
        folder: for what is written meanwhile.
        commands: one a node.
        variables: of the environment, by node.
        nodes: how many there are.
    """
    if reason := why_not():
        pytest.skip(reason)
    (folder / "bin").mkdir(parents=True)
    job = [(command, (variables or {}).get(number, {})) for number, command in enumerate(commands)]
    (folder / "job.json").write_text(json.dumps({"nodes": nodes, "commands": job}), encoding="utf-8")
    environment = {**os.environ, "PATH": path(), **VARIABLES}
    words = ["unshare", *_NEW, *python(), "tests/ranks/on_nodes.py", str(folder / "job.json")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    codes = json.loads((folder / "codes").read_text(encoding="utf-8"))
    said = [(folder / f"said-{number}").read_text(encoding="utf-8") for number in range(len(commands))]
    return [Ended(*each) for each in zip(codes, said, strict=True)]
