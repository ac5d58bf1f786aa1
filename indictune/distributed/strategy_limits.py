"""Which settings a strategy cannot run. Pure checks of the plan, before anything is loaded."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.communication import DEEPSPEED_NAMES
from indictune.distributed.deepspeed_config import leaves_bad_steps_out
from indictune.errors import Problem, problem

STORAGE = "bfloat16"  # type in which `models.adapters.nf4_config` stores packed weights


def check_weights(plan: AnyPlan, quantisation: Mapping[str, Any]) -> list[Problem]:
    """Refuse a method, or weights, that the strategy cannot train.

    Args:
        plan: of the run.
        quantisation: how the checkpoint's own weights are quantised; empty where they are not.
    """
    launch, model, found = plan.launch, plan.model, []
    quantised = model.method == "qlora" or bool(quantisation)
    if quantised and launch.family == "zero3":
        found.append(problem("quantised-under-zero3", "--method", model.method, strategy=launch.strategy))
    if launch.family == "fsdp2" and quantisation.get("load_in_8bit"):
        found.append(problem("8-bit-under-fsdp2", "--model_name_or_path", model.model_name_or_path))
    stored = quantisation.get("bnb_4bit_quant_storage", STORAGE)
    if launch.family == "fsdp2" and quantisation.get("load_in_4bit") and stored != STORAGE:
        name = model.model_name_or_path
        found.append(problem("4-bit-storage-under-fsdp2", "--model_name_or_path", name, stored=stored, needed=STORAGE))
    if launch.family == "fsdp2" and "lm_head" in model.modules_to_save:
        found.append(problem("lm-head-under-fsdp2", "--modules_to_save", "lm_head"))
    if model.device_map is not None and launch.world_size > 1:
        found.append(
            problem("device-map-with-processes", "--device_map", model.device_map, world_size=launch.world_size)
        )
    return found


def default_optimizer(launch: Launch, method: str, has_gpu: bool) -> str | None:
    """The optimizer where `--optim` is not given; None leaves it to the Trainer.

    QLoRA's own: AdamW with paged 8-bit states. States of matrices of 100,000 numbers or more (of an 8B model with
    `--lora_r 16`, three of a layer's 14) move to the CPU when the GPU's memory runs out, until a run is resumed
    (bitsandbytes 0.50, `get_state_buffer` and `load_state_dict`). bitsandbytes pages only with a GPU; DeepSpeed
    brings its own optimizer.
    """
    fits = launch.strategy in ("single", "ddp")
    return "paged_adamw_8bit" if method == "qlora" and has_gpu and fits else None


def check_optimizer_of_strategy(plan: AnyPlan) -> list[Problem]:
    """Refuse an optimizer that the strategy cannot run, or that DeepSpeed would replace without a warning.

    accelerate puts DeepSpeed's CPU Adam in the place of an offloaded optimizer.
    """
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

    bitsandbytes' optimizers do not take FSDP2's sharded parameters: their updates are operators of their own, which
    torch cannot shard, on any device (bitsandbytes 0.50, torch 2.13). Adafactor mixes sharded and whole tensors under
    FSDP2 ("mixed torch.Tensor and DTensor"). Adagrad makes its states before they are sharded: FSDP2 cannot save them
    ("KeyError"), and DeepSpeed (0.19.8) fails at its first step ("IndexError").
    """
    if launch.family == "fsdp2":
        return optim not in (*_BITSANDBYTES_OPTIMIZERS, "adafactor", "adagrad")
    is_of_torch = launch.family.startswith("zero") and "optimizer" not in (launch.deepspeed or {})
    return not (is_of_torch and optim == "adagrad")


def check_communication(plan: AnyPlan) -> list[Problem]:
    """Refuse settings of the communication between ranks that the strategy does not have."""
    launch, training, found = plan.launch, plan.training, []
    dtype = training.reduce_dtype
    if dtype != "float32" and launch.world_size == 1:
        found.append(problem("no-effect", "--reduce_dtype", dtype, other="one process, which sends no gradients"))
    if dtype != "float32" and launch.family == "fsdp2" and plan.model.method != "full":
        found.append(
            problem(
                "no-effect", "--reduce_dtype", dtype, other=f"--method {plan.model.method} under {launch.strategy}"
            )
        )
    in_file = (launch.deepspeed or {}).get("communication_data_type", "auto")
    if in_file not in ("auto", DEEPSPEED_NAMES[dtype]):
        found.append(
            problem(
                "deepspeed-file-contradicts",
                "--deepspeed",
                key="communication_data_type",
                in_file=in_file,
                flag_name="--reduce_dtype",
                wanted=dtype,
            )
        )
    steps = plan.derived.get("gradient_accumulation_steps")
    if training.ddp_static_graph and steps not in (None, 1):
        found.append(problem("static-graph-with-accumulation", "--ddp_static_graph", "true", steps=steps))
    return found


def check_saving(plan: AnyPlan) -> list[Problem]:
    """Refuse `--async_save` where no rank writes shards of all weights."""
    launch, method = plan.launch, plan.model.method
    if not plan.training.async_save:
        return []
    if launch.family != "fsdp2" or launch.world_size == 1:
        where = f"{launch.strategy} on {launch.world_size} process(es)"
        return [problem("async-save-without-shards", "--async_save", "true", where=where)]
    if method != "full":
        return [problem("no-effect", "--async_save", "true", other=f"--method {method}")]
    return []


def check_folders(plan: AnyPlan) -> list[Problem]:
    """Refuse folders in which DeepSpeed could save a checkpoint and never find it again.

    It looks for files by `glob` with the folder's name as a pattern (transformers 5.23, `deepspeed_load_checkpoint`;
    DeepSpeed 0.19.8, `_get_all_ckpt_names`).
    """
    if not plan.launch.strategy.startswith("zero"):
        return []
    resumed = plan.training.resume_from_checkpoint
    folders = {"--output_dir": str(plan.output_dir), "--resume_from_checkpoint": resumed}
    return [
        problem("folder-is-a-pattern", flag, folder)
        for flag, folder in folders.items()
        if folder is not None and glob.escape(folder) != folder
    ]


def check_bad_steps(plan: AnyPlan) -> list[Problem]:
    """Refuse to skip bad steps where DeepSpeed decides which steps are skipped."""
    asked = plan.training.on_nonfinite
    if asked in ("stop", *leaves_bad_steps_out(plan.launch.strategy)):
        return []
    return [problem("skip-under-deepspeed", "--on_nonfinite", asked)]


def forget_pages(optimizer: object) -> None:
    """Take states that were just loaded for what they are: memory of the GPU's own.

    One that bitsandbytes (0.50) has paged says so in its checkpoint too, and on several GPUs it is loaded as it is
    (transformers 5.23, `_load_optimizer_and_scheduler`); the next step would ask CUDA to move pages that are none.
    """
    if not isinstance(optimizer, Optimizer):  # DeepSpeed's, which keeps its own
        return
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                vars(value).pop("is_paged", None)
