"""What each device of a run computes at once, in which type, and how fast."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_tf32_available

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import AnyPlan
from indictune.data.batching import lengths_of
from indictune.distributed.batch_size import steps_of_run
from indictune.distributed.collectives import gather_from_all
from indictune.distributed.sharding import whole_models
from indictune.errors import UserError
from indictune.models.config_shapes import KINDS, MetaModel, meta_model

if TYPE_CHECKING:
    from datasets import Dataset

SMALL_MODEL = 30_000_000  # multiplied parameters that a CPU trains at ease: a judgement


def dtype_of(training: IndicTrainingArguments) -> str:
    """The type in which a run computes: bf16, fp16 or float32."""
    if training.fp16:
        return "fp16"
    return "float32" if training.bf16 is False else "bf16"  # None is bf16, of a LLaMA


def device_counts(args: IndicTrainingArguments) -> dict[str, int]:
    """The devices of all ranks: the name of a GPU, or `CPU` -> number. All ranks must call it."""
    device = args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return dict(Counter(gather_from_all(name)))


def where_it_runs(plan: AnyPlan) -> str:
    """Devices, type and strategy in one line. Devices of other nodes are taken to be like this one's.

    The process group is not up yet: torch asks the driver for the name and makes no context on the GPU.
    """
    ranks, dtype = plan.launch.world_size, dtype_of(plan.training)
    strategy = "" if plan.launch.strategy == "single" else f", strategy {plan.launch.strategy}"
    if plan.gpus == 0:
        processes = "one process" if ranks == 1 else f"{ranks} processes"
        return f"Training on the CPU: {processes}, {dtype}{strategy}"
    used = plan.gpus if plan.model.device_map is not None and ranks == 1 else ranks
    return f"Training on {used} x {torch.cuda.get_device_name(0)} ({dtype}){strategy}"


def is_for_gpus(plan: AnyPlan) -> str:
    """What marks a recipe for GPUs: half precision, a 4-bit base, or a strategy of several devices; empty if none."""
    if plan.model.method == "qlora":
        return "--method qlora"
    dtype = dtype_of(plan.training)
    if dtype != "float32":
        return dtype
    return "" if plan.launch.strategy == "single" else f"strategy {plan.launch.strategy}"


def meta_of(plan: AnyPlan, active_rows: int | None = None) -> MetaModel | None:
    """The plan's model without its weights; None if it is unknown. `active_rows` is that of `meta_model`."""
    if plan.model_config is None or plan.head not in KINDS:
        return None
    with whole_models():
        return meta_model(plan.model, plan.model_config, plan.head, active_rows)


def missing_gpu(plan: AnyPlan) -> str:
    """A warning for a recipe for GPUs on a machine without one; empty where there is nothing to warn of.

    A small model is trained on the CPU in minutes, whatever its recipe was written for.
    """
    if plan.gpus or not (mark := is_for_gpus(plan)):
        return ""
    meta = meta_of(plan)
    if meta is None or meta.counts.multiplied < SMALL_MODEL:
        return ""
    trained, total = f"{meta.counts.trained:,}", f"{meta.counts.total:,}"
    parameters = total if trained == total else f"{trained} OF {total}"
    return f"NO GPU WAS FOUND. THIS RECIPE IS FOR GPUS ({mark}): {parameters} PARAMETERS TRAIN SLOWLY ON A CPU."


def slow_bf16(plan: AnyPlan) -> str:
    """A note that this CPU multiplies slower in bf16 than in float32; empty where it does not.

    Without AMX (Sapphire Rapids and newer) bf16 took twice as long (torch 2.13, two cores of a Xeon with AVX512-BF16).
    """
    if plan.gpus or dtype_of(plan.training) != "bf16":
        return ""
    share = operations_per_second(torch.bfloat16) / operations_per_second()
    if share >= 1:
        return ""
    return f"This CPU multiplies matrices in bf16 at {share:.1f} of its speed in float32. --bf16 false may be faster."


def default_tf32(training: IndicTrainingArguments) -> bool | None:
    """The value of `--tf32` if it is not given; None if it has no effect, as on a T4 or a V100.

    A model in half precision may compute the rest in TF32. A compiled model in fp32 stays as exact as a plain one:
    transformers (5.23) would switch TF32 on.
    """
    if not is_torch_tf32_available():
        return None
    if dtype_of(training) != "float32":
        return True
    is_compiled = training.torch_compile or training.torch_compile_backend or training.torch_compile_mode
    return False if is_compiled else None


def undo_tf32_of_accelerate(args: TrainingArguments) -> None:
    """Switch TF32 off again after accelerate (1.15, `AcceleratorState`) has switched it on for a compiled model."""
    if args.torch_compile and args.tf32 is False:
        torch.backends.cuda.matmul.allow_tf32 = False


LONG_S = 3600.0
_SIDE = 512  # of the multiplied matrices: a forward pass of a small layer


def check_cpu_time(plan: AnyPlan, train: Dataset) -> None:
    """Refuse to train for hours on the CPU what is meant for GPUs, unless `--allow_cpu` is given.

    The time is tokens x 6 x parameters / speed: 2 operations a parameter in the forward pass, and 4 in the backward
    pass, 2 of which an adapter saves. The parameters are those that tokens are multiplied by. Attention, padding,
    evaluations, saving and a second forward pass (`--gradient_checkpointing`) are left out, so it is rather too short;
    layers that are shared count once, and of experts all. The speed is that of a matrix product in fp32 here and now,
    times the processes. In 16 bits a product alone is several times as fast where the CPU has units for it, and a
    whole step is not. A model of unknown size is not refused.

    Raises:
        UserError: `cpu-for-hours`.
    """
    mark = is_for_gpus(plan)
    if plan.gpus or plan.training.allow_cpu or not mark:
        return
    meta, training = meta_of(plan), plan.training
    if meta is None:
        return
    steps = steps_of_run(len(train), training.global_batch_size, training.max_steps, training.num_train_epochs)
    tokens = steps * training.global_batch_size * int(lengths_of(train).sum()) / len(train)
    operations = tokens * (6 if plan.model.method == "full" else 4) * meta.counts.multiplied
    expected_s = operations / (operations_per_second() * plan.launch.world_size)
    if expected_s > LONG_S:
        raise UserError("cpu-for-hours", "--allow_cpu", mark=mark, hours=f"{expected_s / 3600:,.0f}")


def operations_per_second(dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations a second of a product of two matrices in this process."""
    left = torch.ones(_SIDE, _SIDE, dtype=dtype)
    times = []
    for _ in range(3):  # the first one warms up
        began = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - began)
    return 2.0 * _SIDE**3 / min(times)
