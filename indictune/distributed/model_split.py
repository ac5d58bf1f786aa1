"""Split a model over the groups of a run, and keep the ranks of its data axis alike."""

from __future__ import annotations

from typing import Any, cast

import torch
from accelerate.state import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import Launch
from indictune.distributed import average
from indictune.distributed.sharding import repeated_blocks
from indictune.distributed.tensor_parallel import split_matrices
from indictune.distributed.tensor_plans import plan_of, specs_of_deepspeed
from indictune.models.own_model import own_model

PIPELINE, REPLICAS, SHARDS, TENSOR = "pipeline", "replicas", "shards", "tensor"


def split(model: nn.Module, launch: Launch, args: TrainingArguments) -> DeviceMesh | None:
    """Split a model that was loaded whole, before a Trainer has it. All ranks must call it.

    Returns:
        The mesh of the run, by axis; None if only the batch is split, or DeepSpeed splits the model, by our plan.
    """
    if launch.axes.tensor == 1:
        return None
    if launch.deepspeed is not None:
        args.hf_deepspeed_config.config["tensor_parallel"]["partition_config"] = {
            "use_default_specs": False,
            "layer_specs": specs_of_deepspeed(plan_of(own_model(model))),
        }
        return None
    axes = launch.axes
    sizes = (axes.pipeline, axes.replicas, launch.data_size // axes.replicas, axes.tensor)
    mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=(PIPELINE, REPLICAS, SHARDS, TENSOR))
    split_matrices(model, mesh[TENSOR])
    return mesh


def prepare(trainer: Trainer, mesh: DeviceMesh | None) -> None:
    """Prepare a split model before accelerate does: DDP would average the parts of different matrices."""
    if mesh is None:
        return
    assert trainer.model is not None
    if trainer.accelerator.distributed_type == DistributedType.FSDP:
        data = mesh[SHARDS] if mesh[REPLICAS].size() == 1 else mesh[REPLICAS, SHARDS]
        shard_blocks(trainer.model, data, trainer.accelerator.state.fsdp_plugin)
    else:
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)


def shard_blocks(model: nn.Module, mesh: DeviceMesh, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard a split model by FSDP2 over the data axis, or over replicas x shards, as accelerate would.

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
    group = mesh.get_group(SHARDS)  # without FSDP2 each copy is one
    sum_in = getattr(torch, cast(IndicTrainingArguments, trainer.args).reduce_dtype)
    assert trainer.model is not None
    average.average_gradients(trainer.model.parameters(), group, sum_in)
