"""The process group of a run and its timeout."""

from __future__ import annotations

from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from indictune.config.plan import Launch
from indictune.distributed import cpu_adam, cpu_fallback, elastic, strategy_file
from indictune.distributed.engines import engine_of


def bring_up(launch: Launch, environ: MutableMapping[str, str], timeout_s: int) -> dict[str, Any]:
    """Start the process group where the Trainer would not: after a restart, and on a machine without a GPU.

    Returns:
        Training arguments that the CPU fallback and the strategy file need.
    """
    from_file = strategy_file.leave_to_plan(launch, environ)
    limit_waiting(timeout_s)
    if engine_of(launch.strategy).startswith("zero"):
        cpu_adam.remove_stale_locks()
    is_on_cpu = cpu_fallback.is_needed()
    elastic.join(environ, "gloo" if is_on_cpu else None, timeout_s)
    return from_file | (cpu_fallback.start(launch, timeout_s) if is_on_cpu else {})


def limit_waiting(timeout_s: int) -> None:
    """Make `timeout_s` seconds the default of all groups. Call it before the first one.

    DeepSpeed (0.19.8, `TorchBackend.new_group`) makes ZeRO's group without a timeout and takes none from the caller:
    torch (2.13) would wait there for 30 minutes on gloo and 10 on NCCL, with any `--ddp_timeout`.
    """
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, default, timedelta(seconds=timeout_s))
