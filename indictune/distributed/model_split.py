"""Split a model over the groups of a run, and keep the ranks of its data axis alike."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.sharding import repeated_blocks
from indictune.distributed.tensor_parallel import split_matrices

PIPELINE, DATA, TENSOR = "pipeline", "data", "tensor"


def split(model: nn.Module, launch: Launch, args: TrainingArguments) -> DeviceMesh | None:
    """Split a model that was loaded whole, before a Trainer has it. All ranks must call it.

    Returns:
        The mesh of the run, by axis; None if only the batch is split, or another library splits the model.
    """
    if launch.axes.tensor == 1 or launch.deepspeed is not None:
        return None
    axes = launch.axes
    mesh = init_device_mesh(
        args.device.type, (axes.pipeline, launch.data_size, axes.tensor), mesh_dim_names=(PIPELINE, DATA, TENSOR)
    )
    split_matrices(model, mesh[TENSOR])
    return mesh


def prepare(trainer: Trainer, mesh: DeviceMesh | None) -> None:
    """Prepare a split model before accelerate does: DDP would average the parts of different matrices."""
    if mesh is None:
        return
    assert trainer.model is not None
    if trainer.accelerator.distributed_type == DistributedType.FSDP:
        shard_blocks(trainer.model, mesh[DATA], trainer.accelerator.state.fsdp_plugin)
    else:
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)


def shard_blocks(model: nn.Module, mesh: DeviceMesh, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard a split model, or the stage that was cut from it, by FSDP2 over the data axis, as accelerate would.

    accelerate (1.15, `_prepare_tp`) would wrap all other weights as DTensors by a class that transformers 5.23 lacks.
    It leaves a model alone that is sharded already.
    """
    if isinstance(model, FSDPModule):
        return
    settings: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
    }
    blocks = set(repeated_blocks(model))
    for module in reversed(list(model.modules())):  # inner ones first
        if type(module).__name__ in blocks:
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **settings)
    fully_shard(model, **settings)
    plugin.transformer_cls_names_to_wrap = [f"FSDP{name}" for name in blocks]  # accelerate looks for them


def average_gradients(trainer: Trainer, launch: Launch, mesh: DeviceMesh | None) -> None:
    """Average the gradients of a split model over the data axis, after the last micro-batch of a step.

    All ranks must call it. torch's DDP (2.13) turns the parts into plain tensors, and accelerate (1.15) refuses it.
    FSDP2 with one shard would send gradients while others are computed. One exchange a step is simpler.
    """
    axes = launch.axes
    if mesh is None or axes.is_sharded or axes.pipeline > 1 or launch.data_size == 1:  # stages average their own
        return
    if not trainer.accelerator.sync_gradients:
        return
    group = mesh.get_group(DATA)
    assert trainer.model is not None
    gradients = [each.grad for each in trainer.model.parameters() if each.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    for work in [torch.distributed.all_reduce(each, group=group, async_op=True) for each in local]:
        work.wait()
    torch._foreach_div_(local, launch.data_size)
