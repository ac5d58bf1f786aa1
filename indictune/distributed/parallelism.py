"""How the model of a run is split over its ranks, and how their gradients become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.state import DistributedType
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import Launch
from indictune.distributed import collectives, fsdp, sharding
from indictune.distributed.ddp import gradient_buckets, settle_buckets
from indictune.distributed.zero import DEEPSPEED_NAMES
from indictune.models.load import without_adapter
from indictune.models.task_models import is_unread
from indictune.tasks.protocol import Collator

if TYPE_CHECKING:
    from indictune.distributed.pipeline.engine import Pipeline

PIPELINE, REPLICAS, SHARDS, TENSOR = "pipeline", "replicas", "shards", "tensor"


class Parallelism:
    """Splits a model that was loaded whole, before a Trainer has it. All ranks must make it, and call its methods.

    The model is cut or split in place. What an axis needs is imported only if the run has that axis.

    Attributes:
        launch: of the run.
        pipeline: of which this rank has some stages; None without a pipeline.
        mesh: of the run, by axis; None if only the batch is split, or DeepSpeed splits the model.
        context: the ranks that share the tokens of a row; None if no ranks do.
    """

    pipeline: Pipeline | None = None
    context: ProcessGroup | None = None

    def __init__(self, model: nn.Module, launch: Launch, args: IndicTrainingArguments) -> None:
        self.launch = launch
        sharding.fit_to_model(model, args)
        with _weights_sent(model, launch, args):
            if launch.axes.pipeline > 1:
                from indictune.distributed.pipeline.engine import Pipeline

                self.pipeline = Pipeline(model, launch, args, args.pipeline_schedule)
            self.mesh = _split_over_tensor_axis(model, launch, args)
        if launch.axes.context > 1:
            from indictune.distributed.context import share_tokens

            self.context = share_tokens(model, launch, args)

    def set_up(self, trainer: Trainer) -> None:
        """Configure how DDP, FSDP2 or DeepSpeed sums gradients, before accelerate prepares the model."""
        accelerator, args = trainer.accelerator, cast(IndicTrainingArguments, trainer.args)
        assert trainer.model is not None
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            config = accelerator.state.deepspeed_plugin.deepspeed_config
            config["communication_data_type"] = DEEPSPEED_NAMES[args.reduce_dtype]
        elif accelerator.distributed_type == DistributedType.FSDP:
            if not all(parameter.requires_grad for parameter in trainer.model.parameters()):
                # torch 2.13 fails under accumulation if gradients are summed in another type and a group of weights
                # takes no part in the forward pass: "'FSDPParam' object has no attribute '_unsharded_param'". With
                # --bf16 a LLaMA's adapter has such a group.
                return
            plugin = accelerator.state.fsdp_plugin
            policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=getattr(torch, args.reduce_dtype))
        elif accelerator.distributed_type != DistributedType.NO:
            accelerator.ddp_handler = gradient_buckets(args)

    def prepare(self, trainer: Trainer) -> None:
        """Prepare a model that is split before accelerate does: DDP would average the parts of different matrices.

        So is one that accelerate cannot shard, see `fsdp.has_shared_bias`.
        """
        if self.pipeline is not None:
            self.pipeline.prepare(trainer)
        accelerator = trainer.accelerator
        is_sharded = accelerator.distributed_type == DistributedType.FSDP
        assert trainer.model is not None
        if self.mesh is None:
            if is_sharded and fsdp.has_shared_bias(trainer.model):
                whole = accelerator.torch_device_mesh
                mesh = whole and whole[tuple(accelerator.parallelism_config.fsdp_dim_names)]
                fsdp.shard_blocks(trainer.model, mesh, accelerator.state.fsdp_plugin)
            return
        if is_sharded:
            data = self.mesh[SHARDS] if self.mesh[REPLICAS].size() == 1 else self.mesh[REPLICAS, SHARDS]
            fsdp.shard_blocks(trainer.model, data, accelerator.state.fsdp_plugin)
        else:
            accelerator.prepare_model(trainer.model, evaluation_mode=True)

    def settle(self, model: nn.Module, step: Callable[[], object]) -> None:
        """Run `step` until the order in which gradients are added stays the same; see `ddp.settle_buckets`."""
        settle_buckets(model, step)

    def average_gradients(self, trainer: Trainer) -> None:
        """Average the gradients of a split model over the data axis, after the last micro-batch of a step.

        torch's DDP (2.13) turns the parts into plain tensors, and accelerate (1.15) refuses it. FSDP2 with one shard
        would send gradients while others are computed. One exchange a step is simpler.
        """
        axes = self.launch.axes
        if self.mesh is None or axes.is_sharded or axes.pipeline > 1 or self.launch.data_size == 1:
            return  # stages average their own
        if not trainer.accelerator.sync_gradients:
            return
        group = self.mesh.get_group(SHARDS)  # without FSDP2 each copy is one
        sum_in = getattr(torch, cast(IndicTrainingArguments, trainer.args).reduce_dtype)
        assert trainer.model is not None
        sharding.average_gradients(trainer.model.parameters(), group, sum_in)

    def norm_after_clipping(self, trainer: Trainer) -> float | None:
        """The norm of the gradients as they are before the optimizer's step.

        None under DeepSpeed, whose engine has taken the step, and with fp16, whose gradients are scaled.
        """
        if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED or trainer.args.fp16:
            return None
        if self.pipeline is not None:
            return float(self.pipeline.norm())
        norm: Any = Trainer._get_grad_norm(trainer, trainer.model_wrapped)  # type: ignore[no-untyped-call]
        return float(sharding.whole_tensor(norm))

    def own_tokens(self, collator: Collator) -> Collator:
        """The collator of this rank: of its part of each micro-batch, if a context group shares the tokens."""
        if self.context is None:
            return collator
        from indictune.distributed.context import OwnTokens

        axes = self.launch.axes
        return OwnTokens(collator, self.launch.rank // axes.tensor % axes.context, axes.context)

    def compute(self, inputs: dict[str, Any], compute: Callable[[], Tensor]) -> Tensor:
        """What the whole model computes of `inputs`, on all ranks."""
        return compute() if self.pipeline is None else self.pipeline.compute(inputs, compute)

    def measure(
        self, inputs: dict[str, Any], measure: Callable[[dict[str, Any]], Sequence[Tensor]]
    ) -> Sequence[Tensor] | None:
        """What is measured of each row of a micro-batch, [rows]; None on ranks without the last layers."""
        if self.pipeline is not None:
            return self.pipeline.measure(inputs, lambda: measure(dict(inputs)))
        measured = measure(inputs)
        if self.context is not None:
            for each in measured:
                torch.distributed.all_reduce(each, group=self.context)
        return measured

    def write_weights(self, trainer: Trainer, folder: Path, in_shards: bool, save: Callable[[], None]) -> None:
        """Write the whole weights to `folder`, unless a checkpoint has them in shards.

        `save` is the library's saving, which gathers the weights of every strategy but FSDP2 and pipelines.
        """
        model = cast(nn.Module, trainer.model)
        if self.pipeline is not None:
            if not in_shards:
                self.pipeline.write_whole_weights(trainer, folder)
        elif not sharding.is_split(model):
            save()
        elif not in_shards:
            sharding.save_gathered(trainer, folder)


def max_norm(trainer: Trainer) -> float:
    """The largest norm that clipping leaves; 0 clips nothing."""
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        engine: Any = trainer.model_wrapped
        return float(engine.gradient_clipping())
    return float(trainer.args.max_grad_norm)


def splits_one_model(launch: Launch) -> bool:
    """Whether ranks cut or split the model themselves; DeepSpeed and FSDP2 alone send weights by their own means."""
    return launch.axes.pipeline * launch.axes.tensor > 1 and launch.deepspeed is None


def _split_over_tensor_axis(model: nn.Module, launch: Launch, args: IndicTrainingArguments) -> DeviceMesh | None:
    """Split matrices, and return the mesh of the run; None without a tensor axis, or if DeepSpeed splits them."""
    if launch.axes.tensor == 1:
        return None
    from indictune.distributed.tensor import plan_of, specs_of_deepspeed, split_matrices

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


@contextmanager
def _weights_sent(model: nn.Module, launch: Launch, args: IndicTrainingArguments) -> Iterator[None]:
    """A block that cuts or splits a model in place. Then each rank that has not read the weights gets its own.

    A rank holds its own weights and one more; rank 0 holds all until they are sent.
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
def _send(whole: Tensor, own: Tensor | None, name: str, args: IndicTrainingArguments) -> None:
    """Fill this rank's part of a weight; None if it is on other ranks."""
    is_first = args.process_index == 0
    sent = whole.to(args.device) if is_first else torch.empty_like(whole, device=args.device)
    torch.distributed.broadcast(sent.contiguous() if is_first else sent, 0)
    if own is not None and not is_first:
        own.copy_(sharding.split_like(own, sent, name))
