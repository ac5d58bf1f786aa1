"""DeepSpeed's own Adam, which runs where optimizer states are offloaded to the CPU: what a checkpoint lacks of it."""

from __future__ import annotations

from typing import Any

import torch


def complete_states(engine: Any) -> None:
    """Make that optimizer, with states that were just loaded, what it was when they were saved.

    DeepSpeed (0.19.8) puts the saved settings of a group in place of the optimizer's own, and those of torch's AdamW
    lack `bias_correction` ("KeyError" in the first step, where the states were not offloaded before). And it keeps the
    powers of the betas as a product that grows by a factor a step (`cpu_adam.h`, `IncrementStep`), which no checkpoint
    holds: begun anew by `pow` it differs in the last bit, and so do the weights. The steps are counted again, on
    nothing.
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
    """Bring the betas' powers of a `DeepSpeedCPUAdam` to where so many steps have brought them."""
    nothing = [torch.zeros(1) for _ in ("weight", "gradient", "mean", "variance")]
    for step in range(1, steps + 1):
        for group in adam.param_groups:
            settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
            adam.ds_opt_adam.adam_update(adam.opt_id, step, *settings, *nothing)
