"""Several torchrun agents on this machine, each as the launcher of a node; they may be killed, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.ranks.launching import BIN, ROOT, path

# torchrun waits for more nodes before it starts, and for the dead before it restarts: here as short as it allows.
SHORT_WAITS = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"

# Starts a program with its own `/dev/shm`, which is lost with its processes.
OWN_MEMORY = (
    *("unshare", "--user", "--map-root-user", "--mount", "bash", "-c"),
    *('mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"', "agent"),
)


@dataclass
class Agents:
    """The agents of one elastic run.

    Attributes:
        folder: of the run; files of the agents are written next to it.
        command: the script and its flags.
        nodes: the least and the most agents, as torchrun's `--nnodes`.
        variables: of their environment.
        options: of torchrun, added to those below.
        before: words in front of each agent's command, such as `OWN_MEMORY`.
        running: the agents by name.
    """

    folder: Path
    command: Sequence[str]
    nodes: str = "1:4"
    variables: dict[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    before: Sequence[str] = ()
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        """Start agents. They meet in a file, so any of them may be killed."""
        meeting = self.folder.with_name(f"{self.folder.name}-rendezvous")
        options = [
            *("--nnodes", self.nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "9"),
            *("--rdzv-id", self.folder.name, "--rdzv-endpoint", str(meeting), "--monitor-interval", "0.2"),
            *("--rdzv-conf", f"store_type=file,{SHORT_WAITS}", "--local-addr", "127.0.0.1", *self.options),
        ]
        own = {"PATH": path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.variables}
        own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = self.variables.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        for name in names:
            with self.log(name).open("ab") as log:
                self.running[name] = subprocess.Popen(
                    [*self.before, sys.executable, str(BIN / "torchrun"), *options, *self.command],
                    cwd=ROOT,
                    env={**os.environ, **own},
                    stdout=log,
                    stderr=log,
                )

    def log(self, name: str) -> Path:
        """What an agent and its ranks print."""
        return self.folder.with_name(f"{self.folder.name}-{name}.log")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to an agent; SIGKILL to its ranks too, as where a node is lost."""
        agent = self.running.pop(name)
        if number == signal.SIGKILL:
            for each in psutil.Process(agent.pid).children(recursive=True):
                with suppress(psutil.Error):
                    each.kill()
        agent.send_signal(number)
        agent.wait()

    def steps(self) -> list[int]:
        """The steps in the log of the run, in the order in which they were written."""
        log = self.folder / "train_log.jsonl"
        if not log.exists():
            return []
        return [json.loads(line)["step"] for line in log.read_text(encoding="utf-8").splitlines()]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until something holds; fail with the agents' output if it does not."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert any(each.poll() is None for each in self.running.values()), self.output()
            time.sleep(0.1)

    def wait_for_end(self, seconds: float = 180) -> dict[str, int]:
        """The exit codes of the agents."""
        deadline = time.monotonic() + seconds
        return {name: each.wait(deadline - time.monotonic()) for name, each in self.running.items()}

    def output(self) -> str:
        logs = sorted(self.folder.parent.glob(f"{self.folder.name}-*.log"))
        return "\n".join(f"--- {each.name}\n{each.read_text(encoding='utf-8', errors='replace')}" for each in logs)

    def close(self) -> None:
        """Kill what still runs."""
        for name in [*self.running]:
            with suppress(psutil.Error):
                self.kill(name)
