"""The process group of a run that torchrun has restarted."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from indictune.progress import OWN_PROGRESS

JOINING = "joining the other ranks"


def count(environ: Mapping[str, str]) -> int:
    """How often torchrun has restarted this run."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def limit(environ: Mapping[str, str]) -> int:
    """How often torchrun may restart this run (`--max-restarts`)."""
    return int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _is_one_node(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")


def launch_name(environ: Mapping[str, str]) -> str:
    """A name that all ranks of a launch share through all restarts, and that no other launch on the machine has.

    Two launches on one machine need different ports. Ranks on several nodes may name the first machine differently,
    so the name then has no host: launches with one port on separate nodes share it.
    """
    host = socket.gethostname() if _is_one_node(environ) else ""
    return f"{environ.get('TORCHELASTIC_RUN_ID')}-{environ.get('MASTER_PORT')}-{host}"


def attempt(environ: Mapping[str, str]) -> str:
    """A name that all ranks of one start share. A later launch may have the same name."""
    return f"{launch_name(environ)}-{count(environ)}"


def join(environ: Mapping[str, str], backend: str | None, timeout_s: int) -> None:
    """Start the process group after a restart on one node. Otherwise do nothing: the first user of a group starts it.

    torchrun (torch 2.13) keeps one store through all restarts, in which ranks find the addresses of dead processes
    ("Gloo connectFullMesh failed ... Connection refused"; pytorch issue 135712). So each restart gets its own key
    prefix. On several nodes ranks cannot agree on one: `check_processes` refuses restarts there.
    """
    OWN_PROGRESS.passed(JOINING)
    restarts = count(environ)
    if restarts == 0 or not _is_one_node(environ):
        return
    store, rank, world_size = next(rendezvous("env://"))
    torch.distributed.init_process_group(
        backend,
        store=PrefixStore(f"restart-{restarts}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
