"""Bytes that a process sends for each axis of a run, and the time that stages wait, in closed form.

Each formula names its source. `benchmarks/axes.py` measures them on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from indictune.planning.rank_weights import LayerWidths

DataSplit = Literal["nothing", "states", "gradients", "weights"]


@dataclass(frozen=True)
class AxisSizes:
    """Over how many processes a run splits what.

    Attributes:
        data: groups of processes with their own rows.
        tensor: parts of each matrix.
        pipeline: stages.
        context: parts of each row.
        replicas: of a model that is sharded; `data * context / replicas` processes share one copy.
        split: what the data axis splits: DDP nothing, ZeRO-1 optimizer states, ZeRO-2 gradients too, ZeRO-3 and FSDP2
            weights too.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    replicas: int = 1
    split: DataSplit = "nothing"

    @property
    def world(self) -> int:
        """All processes."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def shards(self) -> int:
        """Processes that share one copy of what is split."""
        return self.data * self.context // self.replicas


def bytes_gathered(whole: float, ranks: int) -> float:
    """Bytes that a rank sends, so that all have `whole` bytes, of which each had an equal part.

    In a ring each part is passed on by all ranks but the last (Patarasuk and Yuan 2009, section 4).
    """
    return (ranks - 1) / ranks * whole


def bytes_scattered(whole: float, ranks: int, gpu: bool = True) -> float:
    """Bytes that a rank sends, so that each has an equal part of a sum of `whole` bytes.

    As `gathered`, backwards. torch's gloo (2.13) sends whole sums, of which each rank keeps its part.
    """
    return bytes_gathered(whole, ranks) if gpu else bytes_summed(whole, ranks)


def bytes_summed(whole: float, ranks: int) -> float:
    """Bytes that a rank sends, so that all have the sum of `whole` bytes: scattered, then gathered (the same)."""
    return 2 * bytes_gathered(whole, ranks)


def layer_sums(shape: LayerWidths, sizes: AxisSizes, tokens: float, value_bytes: int, sums: int = 4) -> float:
    """Bytes that a rank sends for a micro-batch through the layers of its stage that the tensor axis splits.

    A layer has two pairs of a matrix split by columns and one by rows. Each pair sums its output in the forward pass,
    and the gradient of its input in the backward pass: 4 sums of tokens x hidden values (Shoeybi et al. 2019,
    Megatron-LM, section 3; Narayanan et al. 2021, section 3.2). Activation checkpointing computes the forward pass
    again, with its 2 sums.
    """
    return shape.layers / sizes.pipeline * sums * bytes_summed(tokens * shape.hidden * value_bytes, sizes.tensor)


def passed_on(shape: LayerWidths, sizes: AxisSizes, tokens: float, value_bytes: int, chunks: int = 1) -> float:
    """Bytes that a middle stage sends for a micro-batch: its output forward, the gradient of its input backward.

    The first and the last stage send half of it. Interleaved stages hold `chunks` pieces of the model each, and send
    so many times as much (Narayanan et al. 2021, section 2.2.2).
    """
    return 2.0 * chunks * tokens * shape.hidden * value_bytes if sizes.pipeline > 1 else 0.0


def keys_passed(
    shape: LayerWidths, sizes: AxisSizes, tokens: float, value_bytes: int, recomputes: bool, gpu: bool = True
) -> float:
    """Bytes that a rank sends for a micro-batch whose rows the context axis splits; `tokens` are those of all parts.

    In each layer, each rank gathers the keys and values of all others in the forward pass, and scatters sums of their
    gradients in the backward pass (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2). Activation
    checkpointing computes the forward pass again. On GPUs these are 2 or 3 times the same bytes.
    """
    both = 2 * tokens * shape.key_values * value_bytes
    gathers = (2 if recomputes else 1) * bytes_gathered(both, sizes.context)
    return shape.layers / sizes.pipeline * (gathers + bytes_scattered(both, sizes.context, gpu))


def data_bytes(
    gradients: float, weights: float, sizes: AxisSizes, micro_batches: int, gathers: int = 2, scatters: int = 1
) -> float:
    """Bytes that a rank sends in a step for the data axis on GPUs.

    Args:
        gradients: bytes of all of them, as they are summed.
        weights: bytes of those that are gathered.
        sizes: of the axes.
        micro_batches: of a step.
        gathers: of the weights in a micro-batch.
        scatters: of the gradients in a step, where weights are split.

    - nothing split: one sum of all gradients.
    - states: the same, then updated weights are gathered (Rajbhandari et al. 2020, ZeRO, section 7).
    - gradients: DeepSpeed (0.19) sums them after each micro-batch.
    - weights: gathered in the forward and again in the backward pass of each micro-batch. FSDP2 scatters gradients
      once a step (without gradient sync but for the last micro-batch; PyTorch documentation of `fully_shard`), ZeRO-3
      (DeepSpeed 0.19) after each micro-batch. With replicas, each rank's share is then summed over them (HSDP).
    """
    if sizes.split == "weights":
        own = bytes_summed(gradients / sizes.shards, sizes.replicas)
        gather = gathers * micro_batches * bytes_gathered(weights, sizes.shards)
        return gather + scatters * bytes_scattered(gradients, sizes.shards) + own
    ranks = sizes.data * sizes.context
    if sizes.split == "nothing":
        return bytes_summed(gradients, ranks)
    times = micro_batches if sizes.split == "gradients" else 1
    return times * bytes_summed(gradients, ranks) + bytes_gathered(weights, ranks)
