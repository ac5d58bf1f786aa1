"""How long a recipe for GPUs would take on the CPU."""

from __future__ import annotations

import time

import torch
from datasets import Dataset

from indictune.config.plan import AnyPlan
from indictune.data.collation import lengths_of
from indictune.distributed.batch_size import steps_of_run
from indictune.distributed.devices import counts_of, dtype_of, is_for_gpus
from indictune.errors import UserError

LONG_S = 3600.0
_SIDE = 512  # of the multiplied matrices: a forward pass of a small layer
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_cpu_time(plan: AnyPlan, train: Dataset) -> None:
    """Refuse to train for hours on the CPU what is meant for GPUs, unless `--allow_cpu` is given.

    Raises:
        UserError: `cpu-for-hours`.
    """
    mark = is_for_gpus(plan)
    if plan.gpus or plan.training.allow_cpu or not mark:
        return
    expected_s = expected_seconds(plan, train)
    if expected_s > LONG_S:
        raise UserError("cpu-for-hours", "--allow_cpu", mark=mark, hours=f"{expected_s / 3600:,.0f}")


def expected_seconds(plan: AnyPlan, train: Dataset) -> float:
    """A rough time of training on the CPU; 0 for a model of unknown size.

    It is tokens x 6 x parameters / speed: 2 operations a parameter in the forward pass, and 4 in the backward pass, 2
    of which an adapter saves. The parameters are those that tokens are multiplied by. Attention, padding, evaluations,
    saving and a second forward pass (`--gradient_checkpointing`) are left out, so it is rather too short; layers that
    are shared count once, and of experts all. The speed is that of a matrix product here and now, times the processes.
    """
    counts = counts_of(plan)
    if counts is None:
        return 0.0
    training = plan.training
    steps = steps_of_run(len(train), training.global_batch_size, training.max_steps, training.num_train_epochs)
    tokens = steps * training.global_batch_size * int(lengths_of(train).sum()) / len(train)
    passes = 6 if plan.model.method == "full" else 4
    return tokens * passes * counts.multiplied / (operations_per_second(dtype_of(training)) * plan.launch.world_size)


def operations_per_second(dtype: str) -> float:
    """Floating-point operations a second of a product of two matrices in this process."""
    left = torch.ones(_SIDE, _SIDE, dtype=_DTYPES[dtype])
    times = []
    for _ in range(3):  # the first one warms up
        began = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(times)
