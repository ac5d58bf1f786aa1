"""Which weights can be trained under which strategy: what cannot work is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

from indictune.config.arguments import ModelArguments
from indictune.config.plan import Launch
from indictune.errors import UserError

STORAGE = "bfloat16"  # in which `models.adapters.nf4_config` keeps packed weights


def check_weights(launch: Launch, args: ModelArguments, quantisation: Mapping[str, Any]) -> None:
    """Refuse a method that the strategy cannot train.

    Args:
        launch: what the launcher asked for.
        args: name the model and the method.
        quantisation: how the checkpoint's own weights are quantised; empty where they are not.

    Raises:
        UserError: all such combinations, each with the way out.
    """
    problems = []
    quantised = args.method == "qlora" or bool(quantisation)
    if quantised and launch.family == "zero3":
        problems.append(
            f"--method {args.method} under {launch.strategy}: ZeRO-3 splits weights while they are loaded, and 4-bit "
            "or 8-bit weights cannot be split so. Use accelerate_configs/fsdp2_qlora.yaml, or ddp.yaml or zero2.yaml "
            "where the base fits on one GPU."
        )
    if launch.family == "fsdp2" and quantisation.get("load_in_8bit"):
        problems.append(
            f"--model_name_or_path {args.model_name_or_path}: its weights are in 8 bits, which FSDP cannot split. "
            "Give the checkpoint that they were quantised from with --method qlora (NF4), or use "
            "accelerate_configs/ddp.yaml."
        )
    stored = quantisation.get("bnb_4bit_quant_storage", STORAGE)
    if launch.family == "fsdp2" and quantisation.get("load_in_4bit") and stored != STORAGE:
        problems.append(
            f"--model_name_or_path {args.model_name_or_path}: its 4-bit weights are stored as {stored}, and FSDP "
            f"splits only what has the type of the rest, {STORAGE}. Give the checkpoint that they were quantised "
            "from with --method qlora, which stores them so."
        )
    if launch.family == "fsdp2" and "lm_head" in args.modules_to_save:
        problems.append(
            "--modules_to_save lm_head under FSDP2: TRL's loss takes the output layer's weight without running the "
            "layer, so that its gradient would be that of each rank's own rows. Leave it out, or use "
            "accelerate_configs/ddp.yaml or zero2.yaml."
        )
    if args.device_map is not None and launch.world_size > 1:
        problems.append(
            f"--device_map {args.device_map}: spreads one process's model over all GPUs, and there are "
            f"{launch.world_size} processes. Leave it out, or start one process with plain python."
        )
    if problems:
        raise UserError(problems)


def default_optimizer(launch: Launch, method: str, has_gpu: bool) -> str | None:
    """The optimizer where `--optim` is not given; None leaves it to the Trainer.

    QLoRA's own, AdamW with 8-bit states. Those of matrices of 100,000 numbers or more (of an 8B model with `--lora_r
    16` three of a layer's 14) move to the CPU when the GPU's memory runs out, until the run goes on from a checkpoint
    (bitsandbytes 0.50, `get_state_buffer` and `load_state_dict`). bitsandbytes pages only with a GPU; DeepSpeed brings
    its own.
    """
    fits = launch.strategy in ("single", "ddp")
    return "paged_adamw_8bit" if method == "qlora" and has_gpu and fits else None


def runs_optimizer(launch: Launch, optim: str) -> bool:
    """Whether the strategy can run an optimizer; arguments as in `check_split_optimizer`."""
    return _why_not(launch, optim) is None


def _why_not(launch: Launch, optim: str) -> str | None:
    """Why a strategy cannot run an optimizer; None where it can.

    bitsandbytes' do not take the split parameters of FSDP2: its updates are operators of its own, which torch cannot
    share out, whatever the device (bitsandbytes 0.50, torch 2.13). Adafactor adds split and whole tensors there
    ("mixed torch.Tensor and DTensor"). Adagrad makes its states before they could be split: FSDP2 cannot save them
    ("KeyError"), and DeepSpeed (0.19.8) does not take its first step ("IndexError").
    """
    if launch.family == "fsdp2" and optim in _BITSANDBYTES_OPTIMIZERS:
        return f"bitsandbytes' optimizers do not take weights that {launch.strategy} has split"
    of_torch: tuple[str, ...] = {"fsdp2": ("adafactor", "adagrad")}.get(launch.family, ())
    if launch.family.startswith("zero") and "optimizer" not in (launch.deepspeed or {}):
        of_torch = ("adagrad",)
    return f"its states cannot be split as {launch.strategy} splits them" if optim in of_torch else None


def check_split_optimizer(launch: Launch, optim: str) -> None:
    """Refuse an optimizer that the strategy cannot run.

    Args:
        launch: what the launcher asked for.
        optim: `--optim`.

    Raises:
        UserError: it cannot.
    """
    if (why := _why_not(launch, optim)) is not None:
        raise UserError(f"--optim {optim}: {why}. Leave --optim out, or use accelerate_configs/ddp.yaml.")


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
