"""Run a command on each of several nodes: network namespaces with their own address and host name, on one switch.

`unshare ... python tests/ranks/on_nodes.py JOB.json`, as `nodes.py` starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

# What reaches another node by ssh: the command, and not the environment.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -o | -p) shift 2 ;; *) shift ;; esac; done
host=$1; shift
exec nsenter --target "$(cat "{folder}/$host")" --net --uts env -i HOME="$HOME" PATH="$PATH" bash -c "$*"
"""
PDSH = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -w) hosts=$2; shift 2 ;; -f) shift 2 ;; *) shift ;; esac; done
rank=0; worst=0
for host in ${hosts//,/ }; do
    command="$*"
    ssh "$host" "${command//%n/$rank}" & waited+=($!)
    rank=$((rank + 1))
done
for each in "${waited[@]}"; do wait "$each" || worst=$?; done
exit "$worst"
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def node(number: int, folder: Path) -> str:
    """Make a node; the id of a process that lives there."""
    keeper = subprocess.Popen(["unshare", "--net", "--uts", "sleep", "infinity"])
    here = os.readlink("/proc/self/ns/uts")
    while os.readlink(f"/proc/{keeper.pid}/ns/uts") == here:
        time.sleep(0.01)
    name, there = f"node{number}", str(keeper.pid)
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", there)
    run("ip", "link", "set", name, "master", "switch", "up")
    for command in (
        ["hostname", name],
        ["ip", "link", "set", "lo", "up"],
        ["ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0"],
        ["ip", "link", "set", "eth0", "up"],
    ):
        run("nsenter", "--target", there, "--net", "--uts", *command)
    (folder / name).write_text(there, encoding="utf-8")
    return there


def main(job: Path) -> None:
    folder = job.parent
    given = json.loads(job.read_text(encoding="utf-8"))
    hosts = ["127.0.0.1 localhost"]
    for number in range(given["nodes"]):  # the second name is that of a pod of scripts/kubernetes
        hosts.append(f"10.77.0.{number + 1} node{number} indicbert-node-0-{number}.indicbert")
    (folder / "hosts").write_text("\n".join([*hosts, ""]), encoding="utf-8")
    run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")
    places = [node(number, folder) for number in range(given["nodes"])]
    for name, text in (("ssh", SSH), ("pdsh", PDSH)):
        (folder / "bin" / name).write_text(text.replace("{folder}", str(folder)), encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    started = []
    for number, (command, variables) in enumerate(given["commands"]):
        with (folder / f"said-{number}").open("wb") as said:
            words = ["nsenter", "--target", places[number], "--net", "--uts", *command]
            environment = {**os.environ, **variables, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
            started.append(subprocess.Popen(words, env=environment, stdout=said, stderr=subprocess.STDOUT))
    codes = [each.wait() for each in started]
    (folder / "codes").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
