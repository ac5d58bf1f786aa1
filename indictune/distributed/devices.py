"""The devices of a run, in words for the user."""

from __future__ import annotations

from collections import Counter

import torch

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import AnyPlan
from indictune.distributed.collectives import gather_from_all
from indictune.distributed.sharding import whole_models
from indictune.models.parameter_counts import KINDS, MetaModel, ParameterCounts, meta_model

SMALL_MODEL = 30_000_000  # multiplied parameters that a CPU trains at ease: a judgement


def dtype_of(training: IndicTrainingArguments) -> str:
    """The type in which a run computes: bf16, fp16 or float32."""
    if training.fp16:
        return "fp16"
    return "float32" if training.bf16 is False else "bf16"  # None is bf16, of a LLaMA


def device_name(device: torch.device) -> str:
    """The name of a GPU, or `CPU`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def device_counts(args: IndicTrainingArguments) -> dict[str, int]:
    """The devices of all ranks: name -> number. All ranks must call it."""
    return dict(Counter(gather_from_all(device_name(args.device))))


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


def counts_of(plan: AnyPlan) -> ParameterCounts | None:
    """The parameters of the plan's model; None if it is unknown."""
    meta = meta_of(plan)
    return None if meta is None else meta.counts


def missing_gpu(plan: AnyPlan) -> str:
    """A warning for a recipe for GPUs on a machine without one; empty where there is nothing to warn of.

    A small model is trained on the CPU in minutes, whatever its recipe was written for.
    """
    if plan.gpus or not (mark := is_for_gpus(plan)):
        return ""
    counts = counts_of(plan)
    if counts is None or counts.multiplied < SMALL_MODEL:
        return ""
    return f"NO GPU WAS FOUND. THIS RECIPE IS FOR GPUS ({mark}): {counts.total:,} PARAMETERS TRAIN SLOWLY ON A CPU."
