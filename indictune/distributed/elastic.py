"""The process group of a run that torchrun has started again."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from indictune.errors import UserError
from indictune.progress import HERE

JOINING = "joining the other ranks"


def count(environ: Mapping[str, str]) -> int:
    """How often torchrun has started this run again (`--max-restarts`)."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def limit(environ: Mapping[str, str]) -> int:
    """How often torchrun may start this run again (`--max-restarts`)."""
    return int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _is_one_node(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")


def check_one_node(environ: Mapping[str, str]) -> None:
    """Refuse restarts on several nodes, which do not go on.

    With `--rdzv_backend c10d` torchrun (torch 2.13, `dynamic_rendezvous.py`) keeps one store, as on one node (`join`),
    and counts a restart on the node alone where a rank has failed: ranks share no name of their start, which could
    tell it from what dead ones have left. Without it, the other nodes are not started again at all.

    Raises:
        UserError: it tells what does go on.
    """
    if limit(environ) and not _is_one_node(environ):
        raise UserError(
            f"--max-restarts {limit(environ)}: on several nodes torchrun does not start all ranks anew, and the run "
            "would not go on. Leave it out, give --resume_from_checkpoint auto, and let what starts the nodes start "
            "all of them again, as scripts/slurm/train.sbatch does."
        )


def launch_name(environ: Mapping[str, str]) -> str:
    """A name that all ranks of a launch share through all restarts, and that another launch at the same time has not.

    Each needs a port of its own on its first machine. Which that is, the ranks of several may call otherwise
    (`torchrun --master_addr`), and two such launches with one port on other machines have one name.
    """
    host = socket.gethostname() if _is_one_node(environ) else ""
    return f"{environ.get('TORCHELASTIC_RUN_ID')}-{environ.get('MASTER_PORT')}-{host}"


def attempt(environ: Mapping[str, str]) -> str:
    """A name that all ranks of a start share. A later launch may have the same: see `supervise.heartbeat`."""
    return f"{launch_name(environ)}-{count(environ)}"


def join(environ: Mapping[str, str], backend: str | None, timeout_s: int) -> None:
    """Bring the process group up after a restart on one node; else leave that to whoever does it first.

    torchrun (torch 2.13) keeps one store through all restarts, in which ranks find the addresses of processes that are
    dead ("Gloo connectFullMesh failed ... Connection refused"; pytorch issue 135712). Keys of each start get a prefix
    of their own. On several nodes there is nothing to agree by (`check_one_node`).

    Args:
        environ: of the process.
        backend: as for `init_process_group`.
        timeout_s: of a collective, in seconds.
    """
    HERE.passed(JOINING)
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
