"""Whether what was asked for can come up, and whether it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.state import DistributedType
from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.errors import UserError


def check_visible_gpus(launch: Launch, visible_gpus: int) -> None:
    """Refuse more processes on this node than it has GPUs.

    Args:
        launch: what the launcher asked for.
        visible_gpus: GPUs that torch sees here; 0 means the CPU stand-in, where any number works.

    Raises:
        UserError: several processes would share a GPU.
    """
    if 0 < visible_gpus < launch.local_world_size:
        raise UserError(
            f"--num_processes: {launch.local_world_size} processes on this node, but {visible_gpus} visible GPU(s). "
            f"Use --num_processes {visible_gpus}, or show more GPUs with CUDA_VISIBLE_DEVICES."
        )


def check_fp16(fp16: bool, has_gpu: bool) -> None:
    """Refuse fp16 on a CPU, where accelerate (1.15) trains in fp32 without a word.

    Raises:
        UserError: it was asked for.
    """
    if fp16 and not has_gpu:
        raise UserError("--fp16 true: needs a GPU, and there is none; give --bf16 true, or neither.")


def check_came_up(launch: Launch, training_args: TrainingArguments) -> None:
    """Compare what the launcher asked for with what is there, before the model loads.

    Raises:
        UserError: another strategy, or another number of processes, came up.
    """
    family = came_up(training_args)
    if family != launch.family:
        raise UserError(
            f"The launcher asked for {launch.family} and {family} came up. Check the accelerate config or --deepspeed "
            "file, and that nothing resets the launcher's environment variables."
        )
    if training_args.world_size != launch.world_size:
        raise UserError(
            f"The launcher asked for {launch.world_size} processes and {training_args.world_size} came up: the "
            "processes do not know of each other. Start all of them with one launcher command."
        )


def check_mixed_precision(planned: Callable[[str], Any], environ: Mapping[str, str]) -> None:
    """Refuse a type that accelerate's flag or file names and the recipe does not: transformers (5.23) would take it,
    and neither `recipe.yaml` nor what is saved would know.

    Args:
        planned: the value that a field of the training arguments will have.
        environ: of this process.

    Raises:
        UserError: the launcher asks for another type.
    """
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    bf16 = planned("bf16")
    own = "fp16" if planned("fp16") else "no" if bf16 is False else "bf16"  # a LLaMA's where nothing is said
    if asked in ("no", own):
        return
    instead = f"give the script --{asked} true" if asked in ("bf16", "fp16") else "give the script --bf16 true"
    raise UserError(
        f"accelerate's --mixed_precision (mixed_precision in its file) is {asked}, and the run's own is {own}: "
        f"recipe.yaml would not have it. Leave it out, and {instead}."
    )


def use_one_gpu(training_args: TrainingArguments, device_map: str | None) -> list[str]:
    """Keep the batches of one process on one GPU, where the Trainer would deal them to all by `nn.DataParallel`.

    DataParallel averages losses over parts of a batch, and is slower than one process a GPU.

    Args:
        training_args: of the run.
        device_map: `--device_map`, which spreads the layers over all GPUs.

    Returns:
        A sentence for the user where GPUs stay unused.
    """
    if training_args.n_gpu <= 1:
        return []
    unused = training_args.n_gpu - 1
    training_args._n_gpu = 1
    if device_map is not None:
        return []
    return [f"One process uses one GPU; {unused} more stay unused. accelerate_configs/ddp.yaml uses them all."]


def came_up(training_args: TrainingArguments) -> str:
    """The family of the strategy that is really there: `single`, `ddp`, `fsdp2` or `zero<stage>`."""
    kind = training_args.distributed_state.distributed_type
    if training_args.deepspeed_plugin is not None:
        # A stage without the process group behind it is a stranger, not a rank.
        grouped = kind == DistributedType.DEEPSPEED and torch.distributed.is_initialized()
        return f"zero{training_args.deepspeed_plugin.zero_stage}" if grouped else "single"
    if kind == DistributedType.NO:
        return "single"
    asked_fsdp = training_args.fsdp_plugin_args is not None or parse_flag_from_env("ACCELERATE_USE_FSDP")
    return "fsdp2" if asked_fsdp and kind != DistributedType.MULTI_CPU else "ddp"
