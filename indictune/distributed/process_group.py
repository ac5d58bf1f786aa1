"""The process group of a run, and how long ranks wait in it and in those that a library makes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from indictune.config.plan import Launch
from indictune.distributed import cpu_fallback, elastic, operator_locks


def bring_up(launch: Launch, environ: Mapping[str, str], timeout_s: int) -> tuple[dict[str, Any], list[str]]:
    """Begin what the ranks of a run talk by, with the CPU stand-in where one is needed.

    Args:
        launch: of the run.
        environ: of this process.
        timeout_s: of a collective, in seconds.

    Returns:
        The training arguments that the stand-in asks for, and what the user should know of it, in sentences.
    """
    limit_waiting(timeout_s)
    operator_locks.wait_for_builds(launch, int(environ.get("LOCAL_RANK", "0")))
    elastic.join(environ, "gloo" if cpu_fallback.is_needed() else None, timeout_s)
    if not cpu_fallback.is_needed():
        return {}, []
    return cpu_fallback.start(launch, timeout_s), cpu_fallback.limits(launch)


def limit_waiting(timeout_s: int) -> None:
    """Give groups that are made without a timeout that of the run. To be called before there is one.

    DeepSpeed (0.19.8, `TorchBackend.new_group`) gives none to the group in which it sums ZeRO's gradients, and takes
    none for it: whatever `--ddp_timeout` is, torch (2.13) would wait there for 30 minutes on gloo, and NCCL would end
    the run after 10.

    Args:
        timeout_s: of a collective, in seconds.
    """
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, default, timedelta(seconds=timeout_s))
