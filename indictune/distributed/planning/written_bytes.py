"""Bytes that a run writes to disk: a checkpoint with all states, and the saved model."""

from __future__ import annotations

from dataclasses import dataclass

from indictune.distributed.engines import engine_of
from indictune.distributed.planning.kept_bytes import FP32
from indictune.distributed.planning.memory import RankMemory


@dataclass(frozen=True)
class Written:
    """Bytes on disk, over all nodes.

    Attributes:
        checkpoint: weights, optimizer states and DeepSpeed's fp32 copies; of an adapter without its base.
        model: that a run saves at its end; an adapter is saved without its base.
    """

    checkpoint: float
    model: float


def written_bytes(memory: RankMemory) -> Written:
    """What a run writes. Saved models have the embedding rows too that an active vocabulary does not train.

    DeepSpeed (0.19) writes fp32 copies of trained weights, and below ZeRO-3 the weights once more.
    """
    plan, types = memory.plan, memory.types
    trained = sum(each.numel for each in memory.weights.every if each.is_trained)
    engine = engine_of(plan.launch.strategy)
    copies = FP32 if engine.startswith("zero") else 0
    copies += types.trained if engine in ("zero1", "zero2") else 0
    model = (trained + memory.weights.unused) * types.trained
    return Written(model + trained * (copies + types.state), model)
