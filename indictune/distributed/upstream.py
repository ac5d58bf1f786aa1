"""Private names of torch, accelerate, transformers and DeepSpeed that strategies need.

tests/training/test_contract.py holds every name, and says what to do when one goes. transformers is imported inside
the functions: the launcher reads this module too.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import DistributedType, PartialState
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


def set_default_timeout(timeout: timedelta) -> None:
    """Make `timeout` that of all groups that give none (torch 2.13). Call it before the first group.

    DeepSpeed (0.19.8, `TorchBackend.new_group`) makes ZeRO's group without a timeout and takes none from the caller:
    torch would wait there for 30 minutes on gloo and 10 on NCCL, with any `--ddp_timeout`.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timeout)


def set_distributed_type(kind: DistributedType) -> None:
    """Change what accelerate (1.15) takes the processes for, after their group has come up.

    It enables FSDP for MULTI_GPU but not for MULTI_CPU, although `fully_shard` works on gloo.
    """
    PartialState._shared_state["distributed_type"] = kind


def launch_values(args: Namespace) -> tuple[Namespace, Any, bool]:
    """What `accelerate launch` (1.15) makes of its command line and its config file, before it starts processes.

    Returns:
        The values of both, the config file, and whether the precision is that of the file.
    """
    from accelerate.commands.launch import _validate_launch_command

    found: tuple[Namespace, Any, bool] = _validate_launch_command(args)
    return found


def use_first_gpu(training_args: TrainingArguments) -> None:
    """Keep the Trainer (5.23) on one of several GPUs. It would use `nn.DataParallel`, and has no flag against it."""
    training_args._n_gpu = 1


def save_whole(trainer: Trainer, folder: Path, weights: dict[str, Any] | None) -> None:
    """Save gathered weights as the Trainer (5.23) saves a model. Its public `save_model` gathers them itself."""
    trainer._save(str(folder), state_dict=weights)


def bitsandbytes_optimizers() -> Sequence[str]:
    """The values of `--optim` that bitsandbytes serves (transformers 5.23)."""
    from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

    return [each.value for each in _BITSANDBYTES_OPTIMIZERS]


def current_deepspeed_config() -> Any:
    """The DeepSpeed configuration by which transformers (5.23) shards the models that it loads; None without one.

    Only a setter is public, and a program that hides the configuration has to put it back.
    """
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    return None if reference is None else reference()


def class_with_code(model: nn.Module) -> tuple[type[Any], str] | None:
    """The class of a model's own code, and the name of the Auto class for it (transformers 5.23); None without one."""
    own = next((each for each in type(model).__mro__ if vars(each).get("_auto_class")), None)
    return None if own is None else (own, vars(own)["_auto_class"])


def save_no_code(model: nn.Module) -> None:
    """Make transformers (5.23) save a model's configuration without the code of its class."""
    type(model)._auto_class = None  # type: ignore[attr-defined]


def whole_gradients(model: nn.Module) -> Iterator[torch.Tensor | None]:
    """The gradients that FSDP2 (torch 2.13) has not scattered yet, which no parameter of the model shows.

    The module that FSDP2 shards at the root of a pipeline's stage is outside the model.
    """
    states = [each._get_fsdp_state() for each in model.modules() if isinstance(each, FSDPModule)]
    states += [other for each in states for other in each._state_ctx.all_states]
    for each in {own for state in states for group in state._fsdp_param_groups for own in group.fsdp_params}:
        unsharded = vars(each).get("_unsharded_param")  # there is none before the first forward pass
        yield from (each.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad)


def divide_and_copy(sums: list[torch.Tensor], number: int, into: list[torch.Tensor]) -> None:
    """Divide tensors by a number and copy them into others, in two calls (torch 2.13). A loop makes two a tensor."""
    torch._foreach_div_(sums, number)
    torch._foreach_copy_(into, sums)
