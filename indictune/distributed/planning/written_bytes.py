"""Bytes that a run writes to disk: a checkpoint with all states, and the saved model."""

from __future__ import annotations

from dataclasses import dataclass

from indictune.config.plan import AnyPlan
from indictune.distributed.launch import engine_of
from indictune.distributed.planning.kept_bytes import FP32, types_of
from indictune.distributed.planning.rank_weights import ModelWeights
from indictune.models.config_shapes import MetaModel


@dataclass(frozen=True)
class Written:
    """Bytes on disk, over all nodes.

    Attributes:
        checkpoint: weights, optimizer states and DeepSpeed's fp32 copies; of an adapter without its base.
        model: that a run saves at its end; an adapter is saved without its base.
    """

    checkpoint: float
    model: float


def written_bytes(plan: AnyPlan, weights: ModelWeights) -> Written:
    """What a run with these weights writes.

    Saved models have the embedding rows too that an active vocabulary does not train. DeepSpeed (0.19) writes fp32
    copies of trained weights, and below ZeRO-3 the weights once more.
    """
    types = types_of(plan)
    trained = sum(each.numel for each in weights.every if each.is_trained)
    engine = engine_of(plan.launch.strategy)
    copies = FP32 if engine.startswith("zero") else 0
    copies += types.trained if engine in ("zero1", "zero2") else 0
    model = (trained + weights.unused) * types.trained
    return Written(model + trained * (copies + types.state), model)


def checkpoint_of_node(plan: AnyPlan, meta: MetaModel) -> int:
    """Bytes of a checkpoint that the processes of one node write. One node writes all that is not split.

    Args:
        plan: of the run, with its launch.
        meta: the model, built by `meta_model`.
    """
    launch, split = plan.launch, plan.launch.axes.tensor * plan.launch.axes.pipeline > 1
    is_split = split or engine_of(launch.strategy) in ("fsdp2", "zero1", "zero2", "zero3")
    nodes = max(1, launch.world_size // launch.local_world_size) if is_split else 1
    return int(written_bytes(plan, ModelWeights(meta)).checkpoint / nodes)
