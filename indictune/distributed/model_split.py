"""Split a model over the groups of a run, send it the weights that rank 0 read, and keep copies alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.state import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import Trainer, TrainingArguments

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import Launch
from indictune.distributed import collectives, sharding
from indictune.distributed.convert_state import split_like
from indictune.distributed.sharding import repeated_blocks
from indictune.distributed.tensor import plan_of, specs_of_deepspeed, split_matrices
from indictune.models.adapters import without_adapter
from indictune.models.causal import is_unread

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
            "layer_specs": specs_of_deepspeed(plan_of(without_adapter(model))),
        }
        return None
    axes = launch.axes
    sizes = (axes.pipeline, axes.replicas, launch.data_size // axes.replicas, axes.tensor)
    mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=(PIPELINE, REPLICAS, SHARDS, TENSOR))
    split_matrices(model, mesh[TENSOR])
    return mesh


def prepare_split_model(trainer: Trainer, mesh: DeviceMesh | None) -> None:
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


def average_split_gradients(trainer: Trainer, launch: Launch, mesh: DeviceMesh | None) -> None:
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
    sharding.average_gradients(trainer.model.parameters(), group, sum_in)


def splits_one_model(launch: Launch) -> bool:
    """Whether ranks cut or split the model themselves; DeepSpeed and FSDP2 alone send weights by their own means."""
    return launch.axes.pipeline * launch.axes.tensor > 1 and launch.deepspeed is None


@contextmanager
def sent_weights(model: nn.Module, launch: Launch, args: TrainingArguments) -> Iterator[None]:
    """A block that cuts or splits a model in place. Then each rank that has not read the weights gets its own.

    All ranks must enter it. A rank holds its own weights and one more; rank 0 holds all until they are sent.
    """
    if not splits_one_model(launch):
        yield
        return
    has_unread = any(collectives.gather_from_all(is_unread(model)))
    whole = {name: each.detach() for name, each in model.named_parameters()} if has_unread else {}
    yield
    own = dict(model.named_parameters())
    for name in list(whole):
        _send(whole.pop(name), own.get(name), name, args)


@torch.no_grad()
def _send(whole: Tensor, own: Tensor | None, name: str, args: TrainingArguments) -> None:
    """Fill this rank's part of a weight; None if it is on other ranks."""
    is_first = args.process_index == 0
    sent = whole.to(args.device) if is_first else torch.empty_like(whole, device=args.device)
    torch.distributed.broadcast(sent.contiguous() if is_first else sent, 0)
    if own is not None and not is_first:
        own.copy_(split_like(own, sent, name))
