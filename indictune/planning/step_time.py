"""Bytes that a step sends and the seconds that it takes: closed forms and data sheets, which no GPU has confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.launch import engine_of
from indictune.distributed.pipeline.layout import bubble, chunks_of
from indictune.planning.hardware import Machine, assumed, known_links
from indictune.planning.memory import RankMemory
from indictune.planning.rank_bytes import FP32, NF4_BYTES, is_half
from indictune.planning.rank_weights import LayerWidths, ModelWeights, Weight, layer_widths

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


# Sums of a layer and micro-batch over the tensor axis. Megatron-LM has 4. transformers (5.23, `ColwiseParallel`) sums
# the gradient of each matrix's input alone: 3 for query, key and value instead of 1, 2 for a gate and what it gates.
SUMS, SUMS_IF_GATED, SUMS_RECOMPUTED = 6, 7, 2
# Bytes that the CPU reads and writes for each offloaded weight in AdamW's step: weight, gradient and two states are
# read, and all but the gradient written.
_ADAM_ON_HOST = 7 * FP32
_SPLITS: dict[str, DataSplit] = {"zero1": "states", "zero2": "gradients", "zero3": "weights", "fsdp2": "weights"}


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the training rows.

    Attributes:
        mean: tokens of a row.
        longest: tokens of one.
        attended: tokens that a token attends to, on average: those of its text. Rows that are packed have several.
        rows: of an epoch; 0 for unknown.
    """

    mean: float
    longest: int
    attended: float
    rows: int = 0


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part, and the bytes that the busiest rank sends for each axis."""

    compute_s: float
    data_s: float
    tensor_s: float
    context_s: float
    stages_s: float
    offload_s: float
    bubble: float
    data_bytes: float
    model_bytes: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        busy = self.compute_s + self.tensor_s + self.context_s + self.stages_s
        return max(busy / (1 - self.bubble), self.data_s) + self.offload_s

    @property
    def sent_bytes(self) -> float:
        """Of all axes."""
        return self.data_bytes + self.model_bytes

    @property
    def sent_s(self) -> float:
        """For which the links are busy; those of the data axis while the GPUs compute."""
        return self.data_s + self.tensor_s + self.context_s + self.stages_s


def axis_sizes(launch: Launch) -> AxisSizes:
    """Over how many processes a launch splits what."""
    axes = launch.axes
    split: DataSplit = "weights" if axes.is_sharded else _SPLITS.get(engine_of(launch.strategy), "nothing")
    return AxisSizes(launch.data_size, axes.tensor, axes.pipeline, axes.context, axes.replicas, split)


def sums_of(plan: AnyPlan) -> int:
    """Sums of a layer and micro-batch over the tensor axis."""
    assert plan.model_config is not None
    sums = SUMS_IF_GATED if layer_widths(plan.model_config).is_gated else SUMS
    return sums + (SUMS_RECOMPUTED if _recomputes(plan) else 0)


def flops_of_gpu(plan: AnyPlan, machine: Machine) -> float:
    """A second of a GPU, in the type of the computation. TF32 is half as fast as 16 bits, by all data sheets."""
    if is_half(plan):
        return machine.flops
    return max(machine.flops_fp32, machine.flops / 2) if plan.training.tf32 else machine.flops_fp32


def estimate_step(
    memory: RankMemory, weights: ModelWeights, machine: Machine, lengths: RowLengths, micro_batches: int
) -> Step:
    """The time of a step.

    Args:
        memory: of the run, which has its plan and the weights of its ranks.
        weights: of the whole model.
        machine: that it runs on.
        lengths: of the training rows.
        micro_batches: of a step.
    """
    plan, sizes, types = memory.plan, axis_sizes(memory.plan.launch), memory.types
    widths, value = layer_widths(memory.config), types.computed
    tokens = plan.training.global_batch_size * lengths.mean
    at_once = tokens / sizes.data / micro_batches
    own = at_once / sizes.context
    inner = sizes.tensor * sizes.context
    heaviest = memory.heaviest
    sums = micro_batches * layer_sums(widths, sizes, own, value, sums_of(plan))
    keys = micro_batches * keys_passed(widths, sizes, at_once, value, _recomputes(plan)) / sizes.tensor
    chunks = chunks_of(plan.training.pipeline_schedule)
    passed = micro_batches * passed_on(widths, sizes, own, value, chunks)
    data = _data_bytes(heaviest, memory, sizes, micro_batches)
    flops = flops_of_step(plan, weights, lengths)
    return Step(
        flops / sizes.world / (assumed("achieved") * flops_of_gpu(plan, machine)),
        sum(size / machine.link(*ring) for size, ring in zip(data, _rings(sizes), strict=True)),
        sums / machine.link(sizes.tensor),
        keys / machine.link(sizes.context, sizes.tensor),
        passed / machine.link(sizes.pipeline, inner * sizes.data),
        _offload_s(heaviest, memory, machine, micro_batches),
        bubble(sizes.pipeline, micro_batches, chunks),
        sum(data),
        sums + keys + passed,
    )


def flops_of_step(plan: AnyPlan, weights: ModelWeights, lengths: RowLengths) -> float:
    """Of a step, as it is computed: with checkpointing, a second forward pass is added to those of the model."""
    return _flops(plan, weights, lengths, 3 if _recomputes(plan) else 2)


def model_flops_of_step(plan: AnyPlan, weights: ModelWeights, lengths: RowLengths) -> float:
    """Of a step, as the model needs them: 2 for each parameter and token forward, 2 for the gradients of activations
    and 2 for those of trained weights (Kaplan et al. 2020, section 2.1), and those of attention, 2 products of tokens
    x length x hidden each (Narayanan et al. 2021, appendix)."""
    return _flops(plan, weights, lengths, 2)


def _flops(plan: AnyPlan, weights: ModelWeights, lengths: RowLengths, passes: int) -> float:
    assert plan.model_config is not None
    widths = layer_widths(plan.model_config)
    tokens = plan.training.global_batch_size * lengths.mean
    attention = 4 * widths.layers * widths.hidden * lengths.attended * tokens
    products, of_trained = weights.multiplied * 2 * tokens, weights.multiplied_trained * 2 * tokens
    return passes * products + of_trained + (passes + 1) * attention


def _recomputes(plan: AnyPlan) -> bool:
    return bool(plan.training.gradient_checkpointing or plan.training.activation_checkpointing)


def _rings(sizes: AxisSizes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size and stride of the ring that shares weights, and of the ring of their copies."""
    ring = sizes.shards if sizes.split == "weights" else sizes.data * sizes.context
    return (ring, sizes.tensor), (sizes.replicas, sizes.tensor * ring)


def _data_bytes(
    weights: Sequence[Weight], memory: RankMemory, sizes: AxisSizes, micro_batches: int
) -> tuple[float, float]:
    """Bytes that a rank sends for the data axis: over the ring of shards, and over their copies."""
    trained = sum(each.numel for each in weights if each.is_trained)
    types = memory.types
    gradients = trained * types.summed
    gathers = _weight_bytes(weights, types.computed) if sizes.split == "weights" else trained * types.computed
    copies = bytes_summed(gradients / sizes.shards, sizes.replicas) if sizes.split == "weights" else 0.0
    scatters = micro_batches if engine_of(memory.plan.launch.strategy) == "zero3" else 1
    return data_bytes(gradients, gathers, sizes, micro_batches, scatters=scatters) - copies, copies


def _weight_bytes(weights: Sequence[Weight], computed: int) -> float:
    return sum(each.numel * (NF4_BYTES if each.is_packed else computed) for each in weights)


def _offload_s(weights: Sequence[Weight], memory: RankMemory, machine: Machine, micro_batches: int) -> float:
    """Seconds in which a GPU waits for CPU memory: shards of gradients go there, updated weights come back, and where
    weights live there too, they come for the forward and the backward pass of each micro-batch."""
    launch, types = memory.plan.launch, memory.types
    if not launch.strategy.endswith("_offload"):
        return 0.0
    shards = axis_sizes(launch).shards
    trained = sum(each.numel for each in weights if each.is_trained) / shards
    link = assumed("of_links") * known_links()[assumed("host_link")]
    whole = _weight_bytes(weights, types.computed) / shards
    times = 1 if engine_of(launch.strategy) == "zero2" else 2 * micro_batches
    adam = trained * _ADAM_ON_HOST * machine.of_node / (1e9 * assumed("host_memory_gb_s"))
    return float((trained * FP32 + times * whole) / link + adam)
