"""The pipeline of a training run: one rank's stages, their gradients and their whole weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import Trainer, TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.pipeline.layout import bubble, chunks_of
from indictune.distributed.pipeline.runner import Batch, IdleTime, Runner, StageLinks
from indictune.distributed.pipeline.stages import Stages, shard, sum_with
from indictune.distributed.sharding import average_gradients, local_part, own_weights, unwrapped, whole_tensor
from indictune.distributed.upstream import save_whole


@dataclass(frozen=True)
class StageGradients:
    """The gradients of one rank's stages.

    The copies are the ranks with the same stages and other rows; None if FSDP2 sums over them. The ends are the ranks
    of the first and the last stage, on these, if both have a weight; else None.
    """

    model: nn.Module
    stages: Stages
    stages_group: ProcessGroup
    copies_group: ProcessGroup | None = None
    ends_group: ProcessGroup | None = None

    def sum(self) -> None:
        """Sum both gradients of a tied weight, and average gradients over the copies. All ranks must call it."""
        tied = self.stages.tied
        if tied is not None and tied.grad is not None:
            torch.distributed.all_reduce(local_part(tied.grad), group=self.ends_group)
        if self.copies_group is not None:
            average_gradients(self.model.parameters(), self.copies_group)

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages, and return it; 0 clips nothing. All ranks must call it."""
        by_mesh: dict[Any, list[nn.Parameter]] = {}  # torch (2.13) mixes no tensors of several meshes
        for each in self.model.parameters():
            if each.grad is not None:
                by_mesh.setdefault(each.grad.device_mesh if isinstance(each.grad, DTensor) else None, []).append(each)
        uncounted = None if self.stages.rank == 0 else self.stages.tied  # the first stage counts it
        square = torch.zeros((), device=next(self.model.parameters()).device)
        for trained in by_mesh.values():  # those on other ranks of a mesh included
            counted = [each.grad for each in trained if each is not uncounted and each.grad is not None]
            square += whole_tensor(get_total_norm(counted)).float() ** 2
        torch.distributed.all_reduce(square, group=self.stages_group)
        norm = square.sqrt()
        for trained in by_mesh.values() if max_norm > 0 else ():
            clip_grads_with_norm_(trained, max_norm, norm)
        return norm


def _gathered(mine: dict[str, Tensor], group: ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """The weights of all stages by name, on the CPU of rank 0; on other ranks their own."""
    weights = {name: whole_tensor(each) for name, each in mine.items()}
    ranks = torch.distributed.get_process_group_ranks(group)
    if ranks[0] != 0:  # another copy of the model
        return weights
    described: list[Any] = [None] * len(ranks)
    mine_described = {name: (each.shape, each.dtype) for name, each in weights.items()}
    torch.distributed.all_gather_object(described, mine_described, group=group)
    rank = torch.distributed.get_rank()
    whole = {name: each.cpu().contiguous() for name, each in weights.items()} if rank == 0 else weights
    for sender, names in zip(ranks[1:], described[1:], strict=True):
        for name, (shape, dtype) in names.items():
            if rank == sender:
                torch.distributed.send(weights[name].contiguous(), ranks[0], group=group)
            elif rank == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                torch.distributed.recv(received, sender, group=group)
                whole[name] = received.cpu()
    return whole


T = TypeVar("T")


class Pipeline:
    """One rank's part of the pipeline of a run, whose model is cut in place. All ranks must make it.

    Make it before the Trainer, which would copy the whole model to the GPU.

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
        rank, ranks, self._schedule = mesh["stages"].get_local_rank(), axes.pipeline, schedule
        self.is_last = rank == ranks - 1
        self.grad_norm: Tensor | None = None
        self._trained = [name for name, each in model.named_parameters() if each.requires_grad]
        chunks = chunks_of(schedule)
        stages = self._stages = Stages(model, rank, ranks, chunks)
        pipelines = mesh.mesh.flatten(1).T.tolist()
        self._last: int = torch.distributed.get_global_rank(self.group, ranks - 1)
        self._device, self._waits = args.device, IdleTime(args.device)
        # As accelerate's around the whole model.
        autocast = partial(torch.autocast, args.device.type, torch.bfloat16, enabled=args.bf16)
        self._runner = Runner(stages, StageLinks(pipelines, is_ring=chunks > 1), schedule, autocast, self._waits)
        self._shards = mesh["copies"] if axes.is_sharded else None
        copies = mesh["copies"].get_group() if launch.data_size > 1 and not axes.is_sharded else None
        ends = _group_of_ends(pipelines) if stages.is_tied else None
        self._gradients = StageGradients(model, stages, self.group, copies, ends)
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
        model = trainer.model
        assert model is not None
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
        """Gather the weights of all stages on rank 0, and write them as one process does. All ranks must call it."""
        model = unwrapped(trainer)
        weights = _gathered(own_weights(model), self.group, trainer.args.device)
        is_adapter = isinstance(model, PeftModel)
        parameters = model.named_parameters() if is_adapter else ()
        trained = {name: whole_tensor(each) for name, each in parameters if each.requires_grad}
        if not trainer.args.should_save:
            return
        save_whole(trainer, folder, trained if is_adapter else weights)
        if is_adapter:  # what was saved has the adapter's part in the first stage alone
            save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})

    def part_of_states(self, model: nn.Module, decayed: Collection[str], whole: dict[str, Any]) -> dict[str, Any]:
        """What this rank loads of the optimizer states of a whole model, numbered as one process numbers its stages.

        All ranks must call it. `decayed` has the names of this rank's parameters with weight decay. They come first in
        the state dict of one process.
        """
        of_stages: list[Any] = [None] * self.group.size()
        torch.distributed.all_gather_object(of_stages, set(decayed), group=self.group)
        all_decayed = set[str]().union(*of_stages)
        in_order = sorted(self._trained, key=lambda name: name not in all_decayed)
        number_of = {name: number for number, name in enumerate(in_order)}
        own = [name for name, each in model.named_parameters() if each.requires_grad]
        own.sort(key=lambda name: name not in decayed)
        with_decay = sum(name in decayed for name in own)
        numbers = [list(range(with_decay)), list(range(with_decay, len(own)))]
        groups = [each | {"params": mine} for each, mine in zip(whole["param_groups"], numbers, strict=True)]
        states = {number: whole["state"][number_of[name]] for number, name in enumerate(own)}
        return {"state": states, "param_groups": groups}

    def waiting(self, micro_batches: int) -> dict[str, float]:
        """The share of the last step in which ranks waited, on average over all, and what the formula says."""
        share = torch.tensor(self._waits.share(), device=self._device)
        torch.distributed.all_reduce(share)
        expected = bubble(self._stages.ranks, micro_batches, chunks_of(self._schedule))
        return {"bubble": share.item() / torch.distributed.get_world_size(), "bubble_formula": expected}


def _group_of_ends(pipelines: list[list[int]]) -> ProcessGroup | None:
    """The first and the last rank of this pipeline; None on ranks between them. All ranks must call it."""
    mine = None
    for ranks in pipelines:
        ends = [ranks[0], ranks[-1]]
        group = torch.distributed.new_group(ends)
        if torch.distributed.get_rank() in ends:
            mine = group
    return mine
