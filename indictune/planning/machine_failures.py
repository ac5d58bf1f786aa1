"""Failures of the machine that a user can mend: memory, ports, network interfaces and `/dev/shm`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import psutil
from transformers import Trainer

from indictune.config.plan import AnyPlan
from indictune.console_text import shown_bytes
from indictune.distributed import process_group
from indictune.errors import Problem, problem
from indictune.planning.hardware import killed_processes
from indictune.planning.out_of_memory import is_out_of_memory, killed_for_memory, out_of_memory
from indictune.progress import OWN_PROGRESS

SHARED_MEMORY = "/dev/shm"
# Of torch's store (2.13), NCCL's and torch's shared memory. torch names its files there /torch_<process>_<number>.
_PORT_IN_USE = re.compile(r"port: (\d+).*EADDRINUSE|EADDRINUSE.*port: (\d+)", re.DOTALL)
_NO_SHARED_MEMORY = re.compile(rf"out of shared memory|insufficient shared memory|{SHARED_MEMORY}|</torch_\d")
_LOST_PEER = re.compile(r"Connection (?:closed|reset) by peer")  # gloo's
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: Killed")


def explain_failure(
    error: BaseException, plan: AnyPlan | None, killed_before: int, trainer: Trainer | None = None
) -> str | None:
    """The problem behind an error, or behind one that caused it; None for any other error.

    Args:
        error: that ended the run on this rank.
        plan: of the run; None before there is one.
        killed_before: `killed_processes` when the run began.
        trainer: that trains; None before.
    """
    for each in _causes(error):
        if found := _explained(each, plan, killed_before, trainer):
            return str(found)
    return None


def check_interfaces(plan: AnyPlan) -> list[Problem]:
    """Refuse `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` that name no network interface of this machine."""
    if plan.launch.world_size == 1:
        return []
    known, found = sorted(psutil.net_if_addrs()), []
    for variable in ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if plan.gpus else ())):
        asked = plan.environ.get(variable, "")
        if asked and not _names_one_of(asked, known, is_exact=variable.startswith("GLOO")):
            found.append(problem("network-interface-missing", variable, asked, known=", ".join(known)))
    return found


def why_gone(plan: AnyPlan | None, killed_before: int) -> list[str]:
    """An answer to a rank that is gone, if the kernel has killed processes for lack of memory; else nothing."""
    return [str(killed_for_memory(plan))] if killed_processes() > killed_before else []


def _names_one_of(asked: str, known: list[str], is_exact: bool) -> bool:
    """Whether a variable names an interface. NCCL takes beginnings, whole names after `=`, and others after `^`."""
    if asked.startswith("^") and not is_exact:
        return True
    if is_exact or asked.startswith("="):
        return any(name in known for name in asked.removeprefix("=").split(","))
    return any(name.startswith(beginning) for name in known for beginning in asked.split(","))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _explained(
    error: BaseException, plan: AnyPlan | None, killed_before: int, trainer: Trainer | None
) -> Problem | None:
    text = str(error)
    if _NO_SHARED_MEMORY.search(text):
        usage = shutil.disk_usage(SHARED_MEMORY)
        sizes = {"free": shown_bytes(usage.free), "capacity": shown_bytes(usage.total)}
        return problem("shared-memory-full", SHARED_MEMORY, **sizes)
    if port := _PORT_IN_USE.search(text):
        return problem("port-in-use", "MASTER_PORT", port[1] or port[2])
    restarts = 0 if plan is None or plan.launch.is_one_node else process_group.limit(plan.environ)
    if restarts and (lost := _LOST_PEER.search(text)):
        return problem("rank-of-other-node-lost", reason=lost[0], restarts=restarts)
    if is_out_of_memory(error):
        return out_of_memory(error, plan, OWN_PROGRESS.step, OWN_PROGRESS.place, trainer)
    if _KILLED_WORKER.search(text) and killed_processes() > killed_before:
        return killed_for_memory(plan)
    return None
