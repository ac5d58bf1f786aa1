"""Elastic runs: torchrun's restarts with other nodes, and the processes that idle meanwhile."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.rendezvous import rendezvous

from indictune.distributed.launch import is_one_node, read_launch
from indictune.errors import UserError

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, on every node,"
_LOOK_EVERY_S = 0.05
_FINISHED, _LEFT = "indictune/finished", "indictune/left"
_IDLE_AT_MOST = timedelta(days=20)
_RANK_0_WAITS_S = 5.0
_AGENT_ENDS_S = 60.0  # within which torchrun ends an idle process after a change of nodes


def restarts_so_far(environ: Mapping[str, str]) -> int:
    """How often torchrun has restarted this node's ranks after a failure. It differs between nodes."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def most_restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun may restart this run (`--max-restarts`)."""
    return int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def launch_name(environ: Mapping[str, str]) -> str:
    """A name that all ranks of a launch share through all restarts, and that no other launch on the machine has.

    Two launches on one machine need different ports. Ranks on several nodes may name the first machine differently,
    so the name then has no host: launches with one port on separate nodes share it.
    """
    host = socket.gethostname() if is_one_node(environ) else ""
    return f"{environ.get('TORCHELASTIC_RUN_ID')}-{environ.get('MASTER_PORT')}-{host}"


def attempt(environ: Mapping[str, str]) -> str:
    """A name that all ranks of one start share. A later launch, or a later start on several nodes, may have it too."""
    number = restarts_so_far(environ) if is_one_node(environ) else ""
    return f"{launch_name(environ)}-{number}"


@dataclass(frozen=True)
class World:
    """The processes that torchrun has started, and how many of them train; the last ones idle."""

    started: int  # by torchrun, on all nodes
    used: int  # the first of them, so many that the global batch divides

    @property
    def idle(self) -> int:
        """How many processes wait for a change of nodes, or the end of the run."""
        return self.started - self.used

    def notes(self, environ: Mapping[str, str], rows: int, rows_at_once: int) -> list[str]:
        """What the user has to know: whether processes idle, and whether nodes can join."""
        found = []
        if self.idle:
            given = f"--global_batch_size {rows} with {rows_at_once} rows at once"
            found.append(f"{self.idle} of {self.started} processes idle: {given} divides by {self.used} at most.")
        of_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if of_agents and most_restarts(environ) and environ.get("GROUP_WORLD_SIZE", "1") != "1":
            found.append(f"No node can join this run, and the first one must stay: {_OWN_STORE} allows both.")
        return found

    def release_idle(self) -> None:
        """Tell idle processes that the run is finished. Rank 0 must call it while its process group is up."""
        store, *_ = next(rendezvous("env://"))
        store.set(_FINISHED, "")
        deadline = time.monotonic() + _RANK_0_WAITS_S
        while store.add(_LEFT, 0) < self.idle and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)


def choose_world(
    environ: MutableMapping[str, str], rows: int, rows_at_once: int | None, deepspeed: str | None = None
) -> World:
    """Use as many processes as the global batch divides by, where torchrun may restart the run with other nodes.

    Sets `WORLD_SIZE` and `LOCAL_WORLD_SIZE` to what is used. If no number of processes divides it, all are used, and
    the run is refused. `rows_at_once` is None if any number of processes can share the rows of a global batch.
    """
    started = int(environ.get("WORLD_SIZE", "1"))
    if not most_restarts(environ) or rows_at_once is None or rows_at_once <= 0:
        return World(started, started)
    sizes = ((size, _data_size(environ, size, deepspeed)) for size in range(started, 0, -1))
    used = next((size for size, data in sizes if data and rows % (rows_at_once * data) == 0), started)
    first_here = int(environ["RANK"]) - int(environ["LOCAL_RANK"])
    here = min(int(environ["LOCAL_WORLD_SIZE"]), max(0, used - first_here))
    environ.update(WORLD_SIZE=str(used), LOCAL_WORLD_SIZE=str(here))
    return World(started, used)


def _data_size(environ: Mapping[str, str], size: int, deepspeed: str | None) -> int | None:
    """The data-parallel ranks among so many processes; None if the strategy file does not allow so many."""
    here = min(size, int(environ["LOCAL_WORLD_SIZE"]))
    try:
        return read_launch({**environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)}, deepspeed).data_size
    except UserError:
        return None


def wait_idle() -> int:
    """Wait until the run is finished, or until torchrun ends this process because the nodes change.

    Returns:
        The exit code: 0 if the run is finished, 1 if rank 0 is lost and torchrun has not noticed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
    try:
        store, *_ = next(rendezvous("env://"))
        store.wait([_FINISHED], _IDLE_AT_MOST)
        store.add(_LEFT, 1)
    except (DistNetworkError, DistStoreError):
        time.sleep(_AGENT_ENDS_S)
        return 1
    return 0
