"""Bytes that a step sends and the seconds that it takes: closed forms and data sheets, which no GPU has confirmed."""

from __future__ import annotations

from dataclasses import dataclass

from indictune.config.plan import AnyPlan, Axes, Launch
from indictune.distributed.launch import engine_of
from indictune.distributed.pipeline.layout import bubble, chunks_of
from indictune.planning.hardware import Machine, assumed, known_links
from indictune.planning.memory import RankMemory
from indictune.planning.rank_bytes import FP32, NF4_BYTES, data_shards, is_half, is_sharded
from indictune.planning.rank_weights import LayerWidths, ModelWeights, layer_widths


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


def layer_sums(shape: LayerWidths, axes: Axes, tokens: float, value_bytes: int, sums: int = 4) -> float:
    """Bytes that a rank sends for a micro-batch through the layers of its stage that the tensor axis splits.

    A layer has two pairs of a matrix split by columns and one by rows. Each pair sums its output in the forward pass,
    and the gradient of its input in the backward pass: 4 sums of tokens x hidden values (Shoeybi et al. 2019,
    Megatron-LM, section 3; Narayanan et al. 2021, section 3.2). Activation checkpointing computes the forward pass
    again, with its 2 sums.
    """
    return shape.layers / axes.pipeline * sums * bytes_summed(tokens * shape.hidden * value_bytes, axes.tensor)


def passed_on(shape: LayerWidths, axes: Axes, tokens: float, value_bytes: int, chunks: int = 1) -> float:
    """Bytes that a middle stage sends for a micro-batch: its output forward, the gradient of its input backward.

    The first and the last stage send half of it. Interleaved stages hold `chunks` pieces of the model each, and send
    so many times as much (Narayanan et al. 2021, section 2.2.2).
    """
    return 2.0 * chunks * tokens * shape.hidden * value_bytes if axes.pipeline > 1 else 0.0


def keys_passed(
    shape: LayerWidths, axes: Axes, tokens: float, value_bytes: int, recomputes: bool, gpu: bool = True
) -> float:
    """Bytes that a rank sends for a micro-batch whose rows the context axis splits; `tokens` are those of all parts.

    In each layer, each rank gathers the keys and values of all others in the forward pass, and scatters sums of their
    gradients in the backward pass (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2). Activation
    checkpointing computes the forward pass again. On GPUs these are 2 or 3 times the same bytes.
    """
    both = 2 * tokens * shape.key_values * value_bytes
    gathers = (2 if recomputes else 1) * bytes_gathered(both, axes.context)
    return shape.layers / axes.pipeline * (gathers + bytes_scattered(both, axes.context, gpu))


def data_bytes(gradients: float, weights: float, launch: Launch, micro_batches: int) -> tuple[float, float]:
    """Bytes that a rank sends in a step for the data axis on GPUs: over the ring of shards, and over their copies.

    The gradients are bytes of all of them, as they are summed, and the weights bytes of those that are gathered.

    - DDP: one sum of all gradients.
    - ZeRO-1: the same, then updated weights are gathered (Rajbhandari et al. 2020, ZeRO, section 7).
    - ZeRO-2: DeepSpeed (0.19) sums gradients after each micro-batch.
    - ZeRO-3 and FSDP2: weights are gathered in the forward and again in the backward pass of each micro-batch. FSDP2
      scatters gradients once a step (without gradient sync but for the last micro-batch; PyTorch documentation of
      `fully_shard`), ZeRO-3 (DeepSpeed 0.19) after each micro-batch. With replicas, each rank's share is then summed
      over them (HSDP).
    """
    engine, ranks = engine_of(launch.strategy), launch.data_size * launch.axes.context
    if _splits_weights(launch):
        shards, scatters = data_shards(launch), micro_batches if engine == "zero3" else 1
        sent = 2 * micro_batches * bytes_gathered(weights, shards) + scatters * bytes_scattered(gradients, shards)
        return sent, bytes_summed(gradients / shards, launch.axes.replicas)
    sums = micro_batches if engine == "zero2" else 1
    gathered = bytes_gathered(weights, ranks) if engine in ("zero1", "zero2") else 0.0
    return sums * bytes_summed(gradients, ranks) + gathered, 0.0


def _splits_weights(launch: Launch) -> bool:
    return is_sharded(launch) or engine_of(launch.strategy) == "zero3"


# Sums of a layer and micro-batch over the tensor axis. Megatron-LM has 4. transformers (5.23, `ColwiseParallel`) sums
# the gradient of each matrix's input alone: 3 for query, key and value instead of 1, 2 for a gate and what it gates.
SUMS, SUMS_IF_GATED, SUMS_RECOMPUTED = 6, 7, 2
# Bytes that the CPU reads and writes for each offloaded weight in AdamW's step: weight, gradient and two states are
# read, and all but the gradient written.
_ADAM_ON_HOST = 7 * FP32


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the training rows."""

    mean: float  # tokens of a row
    longest: int  # tokens of one
    # Tokens that a token attends to, on average: those of its text. Rows that are packed have several.
    attended: float
    rows: int = 0  # of an epoch; 0 for unknown
    read_first: int = 0  # that the model reads once before the first step, as the reference of preferences


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


def flops_of_gpu(plan: AnyPlan, machine: Machine) -> float:
    """A second of a GPU, in the type of the computation. TF32 is half as fast as 16 bits, by all data sheets."""
    if is_half(plan):
        return machine.flops
    return max(machine.flops_fp32, machine.flops / 2) if plan.training.tf32 else machine.flops_fp32


def estimate_step(
    memory: RankMemory, weights: ModelWeights, machine: Machine, lengths: RowLengths, micro_batches: int
) -> Step:
    """The time of a step. The memory has the plan and the weights of ranks; `weights` are those of the whole model."""
    plan, types = memory.plan, memory.types
    launch, axes = plan.launch, plan.launch.axes
    recomputes = bool(plan.training.gradient_checkpointing or plan.training.activation_checkpointing)
    widths, value = layer_widths(memory.config), types.computed
    at_once = plan.training.global_batch_size * lengths.mean / launch.data_size / micro_batches
    own = at_once / axes.context
    sums_of_layer = (SUMS_IF_GATED if widths.is_gated else SUMS) + (SUMS_RECOMPUTED if recomputes else 0)
    sums = micro_batches * layer_sums(widths, axes, own, value, sums_of_layer)
    keys = micro_batches * keys_passed(widths, axes, at_once, value, recomputes) / axes.tensor
    chunks = chunks_of(plan.training.pipeline_schedule)
    passed = micro_batches * passed_on(widths, axes, own, value, chunks)
    trained = sum(each.numel for each in memory.heaviest if each.is_trained)
    gathered = _weight_bytes(memory) if _splits_weights(launch) else trained * types.computed
    data, copies = data_bytes(trained * types.summed, gathered, launch, micro_batches)
    ring = data_shards(launch) if _splits_weights(launch) else launch.data_size * axes.context
    flops = flops_of_step(plan, weights, lengths, recomputes)
    return Step(
        flops / launch.world_size / (assumed("achieved") * flops_of_gpu(plan, machine)),
        data / machine.link(ring, axes.tensor) + copies / machine.link(axes.replicas, axes.tensor * ring),
        sums / machine.link(axes.tensor),
        keys / machine.link(axes.context, axes.tensor),
        passed / machine.link(axes.pipeline, axes.tensor * axes.context * launch.data_size),
        _offload_s(memory, machine, micro_batches),
        bubble(axes.pipeline, micro_batches, chunks),
        data + copies,
        sums + keys + passed,
    )


def flops_of_step(plan: AnyPlan, weights: ModelWeights, lengths: RowLengths, recomputes: bool) -> float:
    """Of a step, as the model needs them, or with the second forward pass of checkpointing.

    A model needs 2 for each parameter and token forward, 2 for the gradients of activations and 2 for those of trained
    weights (Kaplan et al. 2020, section 2.1), and those of attention, 2 products of tokens x length x hidden each
    (Narayanan et al. 2021, appendix).
    """
    widths, passes = layer_widths(plan.known_config), 3 if recomputes else 2
    tokens = plan.training.global_batch_size * lengths.mean
    attention = 4 * widths.layers * widths.hidden * lengths.attended * tokens
    products, of_trained = weights.multiplied * 2 * tokens, weights.multiplied_trained * 2 * tokens
    return passes * products + of_trained + (passes + 1) * attention


def reading_s(plan: AnyPlan, weights: ModelWeights, machine: Machine, lengths: RowLengths) -> float:
    """Seconds in which all GPUs read what comes before the first step: a forward pass, as in `flops_of_step`."""
    widths = layer_widths(plan.known_config)
    of_token = 2 * weights.multiplied + 4 * widths.layers * widths.hidden * lengths.attended
    flops = lengths.read_first * lengths.mean * of_token
    return float(flops / machine.gpus / (assumed("achieved") * flops_of_gpu(plan, machine)))


def _weight_bytes(memory: RankMemory) -> float:
    return sum(each.numel * (NF4_BYTES if each.is_packed else memory.types.computed) for each in memory.heaviest)


def _offload_s(memory: RankMemory, machine: Machine, micro_batches: int) -> float:
    """Seconds in which a GPU waits for CPU memory: shards of gradients go there, updated weights come back, and where
    weights live there too, they come for the forward and the backward pass of each micro-batch."""
    launch = memory.plan.launch
    if not launch.strategy.endswith("_offload"):
        return 0.0
    shards = data_shards(launch)
    trained = sum(each.numel for each in memory.heaviest if each.is_trained) / shards
    link = assumed("of_links") * known_links()[assumed("host_link")]
    times = 1 if engine_of(launch.strategy) == "zero2" else 2 * micro_batches
    adam = trained * _ADAM_ON_HOST * machine.of_node / (1e9 * assumed("host_memory_gb_s"))
    return float((trained * FP32 + times * _weight_bytes(memory) / shards) / link + adam)
