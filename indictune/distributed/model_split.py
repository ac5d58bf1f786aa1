"""Split a model over the groups of a run, and keep the ranks of its data axis alike."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from indictune.config.plan import Launch
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
    if mesh is not None:
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)


def average_gradients(trainer: Trainer, launch: Launch, mesh: DeviceMesh | None) -> None:
    """Average the gradients of a split model over the data axis, after the last micro-batch of a step.

    All ranks must call it. torch's DDP (2.13) turns the parts into plain tensors, and accelerate (1.15) refuses it.
    FSDP2 with one shard would send gradients while others are computed. One exchange a step is simpler.
    """
    if mesh is None or launch.axes.is_sharded or launch.data_size == 1 or not trainer.accelerator.sync_gradients:
        return
    group = mesh.get_group(DATA)
    assert trainer.model is not None
    gradients = [each.grad for each in trainer.model.parameters() if each.grad is not None]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    for work in [torch.distributed.all_reduce(each, group=group, async_op=True) for each in local]:
        work.wait()
    torch._foreach_div_(local, launch.data_size)
