"""Which settings a strategy cannot run, and which launch can resume the state of another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.launch import engine_of
from indictune.distributed.upstream import bitsandbytes_optimizers
from indictune.distributed.zero import leaves_bad_steps_out
from indictune.errors import Problem, problem

STORAGE = "bfloat16"  # type in which `models.adapters.nf4_config` stores packed weights


def check_weights(plan: AnyPlan, quantisation: Mapping[str, Any]) -> list[Problem]:
    """Refuse a method or weights that the strategy cannot train.

    `quantisation` is that of the checkpoint's own weights, empty for none. FSDP2 shards 4-bit weights only if they are
    stored in the type of the other weights.
    """
    launch, model, found = plan.launch, plan.model, []
    is_stored_otherwise = quantisation.get("bnb_4bit_quant_storage", STORAGE) != STORAGE
    unshardable = {
        "zero3": model.method == "qlora" or bool(quantisation),
        "fsdp2": quantisation.get("load_in_8bit") or (quantisation.get("load_in_4bit") and is_stored_otherwise),
    }
    if unshardable.get(engine_of(launch.strategy)):
        name = model.model_name_or_path
        found.append(problem("quantised-weights-sharded", "--model_name_or_path", name, strategy=launch.strategy))
    if engine_of(launch.strategy) == "fsdp2" and "lm_head" in model.modules_to_save:
        found.append(problem("lm-head-under-fsdp2", "--modules_to_save", "lm_head"))
    if model.device_map is not None and launch.world_size > 1:
        found.append(
            problem("device-map-with-processes", "--device_map", model.device_map, world_size=launch.world_size)
        )
    return found


def default_optimizer(launch: Launch, method: str, has_gpu: bool) -> str | None:
    """The optimizer if `--optim` is not given; None leaves it to the Trainer.

    QLoRA's own is AdamW with paged 8-bit states: those of at least 100,000 numbers move to the CPU when the GPU's
    memory runs out (bitsandbytes 0.50, `get_state_buffer`). bitsandbytes pages only with a GPU, and DeepSpeed brings
    its own optimizer.
    """
    fits = launch.strategy in ("single", "ddp")
    return "paged_adamw_8bit" if method == "qlora" and has_gpu and fits else None


def check_optimizer_of_strategy(plan: AnyPlan) -> list[Problem]:
    """Refuse an optimizer that the strategy cannot run, or that accelerate would replace with DeepSpeed's CPU Adam."""
    launch, optim = plan.launch, str(plan.training.optim)
    found = []
    if not runs_optimizer(launch, optim):
        found.append(problem("optimizer-cannot-be-sharded", "--optim", optim, strategy=launch.strategy))
    is_offloaded = launch.strategy.startswith("zero") and launch.strategy.endswith("_offload")
    if is_offloaded and "adamw" not in optim.lower():
        found.append(problem("offload-needs-adamw", "--optim", optim, strategy=launch.strategy))
    return found


def runs_optimizer(launch: Launch, optim: str) -> bool:
    """Whether the strategy can run an optimizer.

    Under FSDP2, torch cannot shard the custom operators of bitsandbytes' optimizers (bitsandbytes 0.50, torch 2.13).
    Adafactor mixes sharded and full tensors there ("mixed torch.Tensor and DTensor"). Adagrad makes its states before
    they are sharded: FSDP2 cannot save them ("KeyError"), and DeepSpeed (0.19.8) fails at the first step
    ("IndexError").
    """
    if engine_of(launch.strategy) in ("fsdp2", "tp"):
        return optim not in (*bitsandbytes_optimizers(), "adafactor", "adagrad")
    return not (engine_of(launch.strategy).startswith("zero") and optim == "adagrad")


def check_communication(plan: AnyPlan) -> list[Problem]:
    """Refuse settings of the communication between ranks that the strategy does not have."""
    launch, training, found = plan.launch, plan.training, []
    if training.reduce_dtype != "float32" and engine_of(launch.strategy) == "fsdp2" and plan.model.method != "full":
        other = f"--method {plan.model.method} under {launch.strategy}"
        found.append(problem("no-effect", "--reduce_dtype", training.reduce_dtype, other=other))
    steps = plan.derived.get("gradient_accumulation_steps")
    if training.ddp_static_graph and steps not in (None, 1):
        found.append(problem("static-graph-with-accumulation", "--ddp_static_graph", "true", steps=steps))
    return found


def check_saving(plan: AnyPlan) -> list[Problem]:
    """Refuse `--async_save` if checkpoints are not shards of all weights, and a push of each save if they are."""
    launch, method, training = plan.launch, plan.model.method, plan.training
    splits = engine_of(launch.strategy) in ("fsdp2", "tp") or launch.axes.pipeline > 1
    has_shards = splits and launch.world_size > 1 and method == "full"
    where = f"{launch.strategy} on {launch.world_size} process(es) with --method {method}"
    found = []
    if training.async_save and not has_shards:
        found.append(problem("async-save-without-shards", "--async_save", "true", where=where))
    if training.push_to_hub and training.hub_strategy == "every_save" and has_shards:
        found.append(problem("push-of-shards", "--hub_strategy", "every_save", where=where))
    return found


def check_bad_steps(plan: AnyPlan) -> list[Problem]:
    """Refuse a policy for bad steps that the strategy does not have."""
    asked = plan.training.on_nonfinite
    if asked in ("stop", *leaves_bad_steps_out(plan.launch.strategy)):
        return []
    return [problem("skip-under-deepspeed", "--on_nonfinite", asked)]


def forget_pages(optimizer: object) -> None:
    """Mark loaded states as not paged.

    The mark of bitsandbytes (0.50) is in its checkpoint too, and is loaded on several GPUs (transformers 5.23,
    `_load_optimizer_and_scheduler`). The next step would ask CUDA to move pages that do not exist.
    """
    if not isinstance(optimizer, Optimizer):  # DeepSpeed's
        return
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                vars(value).pop("is_paged", None)


# Each of these resumes the checkpoints of the others, on any number of processes (`convert_state`). ZeRO's states
# cannot be converted: DeepSpeed's universal checkpoints were 8e-4 off in loss after 20 steps (0.19.8).
_INTERCHANGEABLE = frozenset({"single", "ddp", "fsdp2", "tp"})

# A pattern of flags that say how a run is distributed, which changes no step.
FLAGS_OF_STRATEGIES = "(ddp|fsdp)(_.*)?|pipeline_schedule"


# The files of a checkpoint in which DeepSpeed (0.19.8) keeps the parts of matrices, one for each rank of a group.
_PART = re.compile(r"mp_rank_(\d+)_model_states")


def parts_of_matrices(files: Iterable[str]) -> int:
    """Into how many parts DeepSpeed split the matrices of a checkpoint, by the names of its files; 1 if it did not."""
    found = [int(part[1]) for part in map(_PART.search, files) if part]
    return max(found, default=0) + 1


def can_resume(strategy: str, world_size: int, launch: Launch, parts: int = 1) -> bool:
    """Whether `launch` can load weights and optimizer states that `world_size` processes of `strategy` wrote.

    `parts` is `parts_of_matrices` of the checkpoint.
    """
    family = engine_of(strategy)
    if {family, engine_of(launch.strategy)} <= _INTERCHANGEABLE:
        return True
    return (family, world_size, parts) == (engine_of(launch.strategy), launch.world_size, launch.axes.tensor)


def not_carried_over(strategy: str, world_size: int, launch: Launch, optim: str | None, parts: int = 1) -> str | None:
    """The states that `launch` cannot take over, as for `can_resume`; None where it takes all.

    `optim` is the `--optim` that wrote them; None if it is not known.
    """
    if not can_resume(strategy, world_size, launch, parts):
        return "ZeRO's states"
    families = {engine_of(strategy), engine_of(launch.strategy)}
    is_split_anew = bool(families & {"fsdp2", "tp"}) and len(families) > 1
    if is_split_anew and optim is not None and (optim == "adafactor" or optim.endswith(("4bit", "8bit"))):
        return f"the states of --optim {optim}, which are not split as weights are,"
    return None
