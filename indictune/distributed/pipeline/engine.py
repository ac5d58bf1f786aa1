"""The pipeline of a training run: one rank's stages, connected with the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer, TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.pipeline.gradients import StageGradients
from indictune.distributed.pipeline.links import Links
from indictune.distributed.pipeline.runner import Batch, Runner
from indictune.distributed.pipeline.schedule import bubble, chunks_of
from indictune.distributed.pipeline.sharded_stages import shard, sum_with
from indictune.distributed.pipeline.stages import Stages
from indictune.distributed.pipeline.waits import Waits
from indictune.distributed.pipeline.whole_state import part_of_states, write_whole_weights
from indictune.distributed.sharding import unwrapped

T = TypeVar("T")


def cut_into_stages(model: nn.Module, launch: Launch, args: TrainingArguments, schedule: str) -> Pipeline | None:
    """Cut a model in place into the stages of this rank, if the run has a pipeline. All ranks must call it.

    Call it before the Trainer exists, which would copy the whole model to the GPU.
    """
    return Pipeline(model, launch, args, schedule) if launch.axes.pipeline > 1 else None


class Pipeline:
    """One rank's part of the pipeline of a run. Arguments as of `cut_into_stages`.

    Attributes:
        is_last: whether this rank has the last stage, and so the logits.
        grad_norm: over all stages, of the last step, before clipping.
        group: the ranks of this pipeline, by stage.
    """

    def __init__(self, model: nn.Module, launch: Launch, args: TrainingArguments, schedule: str) -> None:
        axes = launch.axes
        sizes = (axes.pipeline, launch.data_size, axes.tensor)
        mesh = init_device_mesh(args.device.type, sizes, mesh_dim_names=("stages", "copies", "tensor"))
        self.group: ProcessGroup = mesh["stages"].get_group()
        self._rank, self._ranks, self._schedule = mesh["stages"].get_local_rank(), axes.pipeline, schedule
        self.is_last = self._rank == self._ranks - 1
        self.grad_norm: Tensor | None = None
        self._trained = [name for name, each in model.named_parameters() if each.requires_grad]
        chunks = chunks_of(schedule)
        stages = Stages(model, self._rank, self._ranks, chunks)
        pipelines = mesh.mesh.flatten(1).T.tolist()
        self._last: int = torch.distributed.get_global_rank(self.group, self._ranks - 1)
        self._device, self._in_bf16 = args.device, args.bf16
        self._waits = Waits(args.device)
        links = Links(pipelines, is_ring=chunks > 1)
        self._runner = Runner(stages, links, self._rank, self._ranks, schedule, self._autocast, self._waits)
        self._stages = stages
        self._shards = mesh["copies"] if axes.is_sharded else None
        copies = mesh["copies"].get_group() if launch.data_size > 1 and not axes.is_sharded else None
        ends = _group_of_ends(pipelines) if stages.is_tied else None
        self._gradients = StageGradients(
            model, self.group, copies, lambda: stages.tied, ends, counts_tied=self._rank == 0
        )
        self._batches = list[Batch]()

    def train(self, trainer: Trainer, inputs: Batch, num_items_in_batch: Tensor | None) -> Tensor:
        """Keep a micro-batch; with the last one of a step, run all of them. Gradients are then summed and clipped.

        Returns:
            The summed loss of this pipeline's micro-batches, on all of its ranks; 0 before the last one.
        """
        self._batches.append(inputs)
        total = torch.zeros((), device=self._device)
        if not trainer.accelerator.sync_gradients:
            return total
        batches, self._batches = self._batches, []
        model, optimizer = trainer.model, trainer.optimizer
        assert model is not None
        assert optimizer is not None
        model.train()

        def loss(batch: Batch) -> Tensor:
            share: Any = trainer.compute_loss(model, dict(batch), num_items_in_batch=num_items_in_batch)
            return share  # type: ignore[no-any-return]

        found = self._runner.train(batches, loss, trainer.accelerator.backward)
        total = total if found is None else found.float()
        torch.distributed.broadcast(total, self._last, group=self.group)
        self._gradients.sum()
        self.grad_norm = self._gradients.clip(trainer.args.max_grad_norm)
        return total

    def norm(self) -> Tensor:
        """The norm of the gradients over all stages, as they are now. All ranks must call it."""
        return self._gradients.clip(0.0)

    def measure(self, inputs: Batch, measure: Callable[[], T]) -> T | None:
        """What `measure` finds on the last rank, where it may call the model; None on the others. All must call it."""
        return self._runner.measure(inputs, lambda _: measure())

    def compute(self, inputs: Batch, compute: Callable[[], Tensor]) -> Tensor:
        """As `measure`, of a tensor that all ranks of the pipeline get on their CPU."""
        measured = self.measure(inputs, compute)
        found = [None if measured is None else measured.cpu()]
        torch.distributed.broadcast_object_list(found, self._last, group=self.group, device=self._device)
        assert found[0] is not None
        return found[0]

    def prepare(self, trainer: Trainer) -> None:
        """Shard the stage if asked to, and let accelerate prepare only its number type: all ranks were one DDP."""
        if self._shards is not None:
            assert trainer.model is not None
            root = shard(trainer.model, self._stages, self._shards)
            self._runner.before_backward = partial(sum_with, root)
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)

    def write_whole_weights(self, trainer: Trainer, folder: Path) -> None:
        """Write the weights of all stages as one process does. All ranks must call it."""
        write_whole_weights(trainer, unwrapped(trainer), folder, self.group)

    def part_of_states(self, model: nn.Module, decayed: Collection[str], whole: dict[str, Any]) -> dict[str, Any]:
        """What this rank loads of the optimizer states of a whole model. All ranks must call it."""
        return part_of_states(whole, model, decayed, self._trained, self.group)

    def waiting(self, micro_batches: int) -> dict[str, float]:
        """The share of the last step in which ranks waited, on average over all, and what the formula says."""
        share = torch.tensor(self._waits.share(), device=self._device)
        torch.distributed.all_reduce(share)
        expected = bubble(self._ranks, micro_batches, chunks_of(self._schedule))
        return {"bubble": share.item() / torch.distributed.get_world_size(), "bubble_formula": expected}

    def _autocast(self) -> AbstractContextManager[None]:
        """As accelerate's around the whole model, for a stage that is not the last."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._in_bf16)


def _group_of_ends(pipelines: list[list[int]]) -> ProcessGroup | None:
    """The first and the last rank of this pipeline; None on ranks between them. All ranks must call it."""
    mine = None
    for ranks in pipelines:
        ends = [ranks[0], ranks[-1]]
        group = torch.distributed.new_group(ends)
        if torch.distributed.get_rank() in ends:
            mine = group
    return mine
