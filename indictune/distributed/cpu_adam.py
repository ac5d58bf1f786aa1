"""DeepSpeed's CPU Adam, which runs if optimizer states are offloaded: its build, and what a checkpoint lacks of it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root

from indictune.config.plan import Launch

SECONDS_OF_A_BUILD = 600  # cpu_adam takes one to two minutes


def needs_cpu_adam(launch: Launch) -> bool:
    """Whether a DeepSpeed configuration offloads the optimizer."""
    zero = (launch.deepspeed or {}).get("zero_optimization") or {}
    return bool((zero.get("offload_optimizer") or {}).get("device", "none") != "none")


def complete_states(engine: Any) -> None:
    """Complete the optimizer after its states were loaded.

    DeepSpeed (0.19.8) replaces the optimizer's settings by saved ones. Those of torch's AdamW, which ran if the states
    were not offloaded before, lack `bias_correction` ("KeyError" in the first step). It also keeps the powers of the
    betas as a product (`cpu_adam.h`, `IncrementStep`), which no checkpoint holds. Computed by `pow`, they and so the
    weights differ in the last bit. Steps on an empty weight multiply them again.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # slow

    adam = engine.optimizer.optimizer
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    for group in adam.param_groups:
        for name, value in adam.defaults.items():
            group.setdefault(name, value)
    for state in adam.state.values():
        state["step"] = int(state["step"])  # torch's AdamW counts in a tensor
    count_again(adam, max((state["step"] for state in adam.state.values()), default=0))


def count_again(adam: Any, steps: int) -> None:
    """Bring the betas' powers of a `DeepSpeedCPUAdam` to those after `steps` steps."""
    nothing = [torch.zeros(1) for _ in ("weight", "gradient", "mean", "variance")]
    for step in range(1, steps + 1):
        for group in adam.param_groups:
            settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
            adam.ds_opt_adam.adam_update(adam.opt_id, step, *settings, *nothing)


def remove_stale_locks() -> None:
    """Remove each lock that is older than any build, before DeepSpeed loads its operators.

    torch (2.13) makes a file `lock` while it compiles an operator, and waits for it in `FileBaton.wait`.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")  # else there is a folder for each build of torch
    locks = Path(given).glob("*/lock") if given else Path(get_default_build_root()).glob("*/*/lock")
    for lock in locks:
        with suppress(FileNotFoundError):  # its build has ended, or another rank removed it
            if time.time() - lock.stat().st_mtime > SECONDS_OF_A_BUILD:
                lock.unlink()
