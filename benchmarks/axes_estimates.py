"""Seconds of a step and memory of a GPU on some machines, estimated by `benchmarks/axes_formulas.py`.

No GPU has confirmed the estimates. The assumptions are the constants below. A step takes

    max((compute + sums of the tensor axis + keys of the context axis + messages between stages) / (1 - bubble), data)

where `data` is the communication of the data axis, which runs beside the rest at best. Each part is the bytes that a
process sends, over the slowest link of its ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from benchmarks import axes_formulas as formulas
from benchmarks.axes_formulas import Shape, Sizes
from benchmarks.expected_memory import model_of

HALF = 2  # bytes of bf16: weights in the computation and values between layers
FP32 = 4  # bytes of a gradient as it is summed
ACHIEVED = 0.4  # of the arithmetic that the data sheet promises, in matrix products of this size
OF_LINKS = 0.8  # of the bytes a second that the data sheet promises
GPU_BYTES = 80e9
TOKENS_AT_ONCE = 8192  # most tokens of a micro-batch
# Sums of a layer and micro-batch over the tensor axis. Megatron-LM has 4. transformers (5.23, `ColwiseParallel`) sums
# the gradient of each matrix's input alone: 3 for query, key and value instead of 1, 2 for a gate and what it gates.
SUMS = {"bert": 6, "llama": 7}
# Bytes of a layer at work for a token and hidden unit, split over the tensor axis or not (Korthikanti et al. 2022,
# section 4.2).
SPLIT_ACTIVATIONS, WHOLE_ACTIVATIONS = 24, 10


@dataclass(frozen=True)
class Machine:
    """GPUs, and the links between them.

    Attributes:
        name: for a table.
        short: for the head of a column.
        gpus: in all nodes.
        of_node: GPUs of a node.
        in_node: bytes a second in one direction, of each GPU within a node.
        between_nodes: the same, to another node.
        flops: of a GPU in bf16, without sparsity.
    """

    name: str
    short: str
    gpus: int
    of_node: int
    in_node: float
    between_nodes: float
    flops: float

    def link(self, size: int, stride: int = 1) -> float:
        """Bytes a second of rings of `size` processes, of which each is the `stride`-th after the one before.

        A node's members of a ring add up their ways to the next node: NCCL makes as many rings as there are ports,
        each with a part of the bytes, and only one member of each ring sends to another node.
        """
        if size * stride <= self.of_node:
            return OF_LINKS * self.in_node
        members = max(1, self.of_node // stride)
        return OF_LINKS * min(self.in_node, members * self.between_nodes)


# NVIDIA's data sheets: H100 SXM 989 TFLOP/s and 900 GB/s of NVLink in both directions; a DGX H100 has a port of
# 400 Gb/s InfiniBand for each GPU. The slow nodes have 100 Gb/s Ethernet each. A100 PCIe: 312 TFLOP/s, and 64 GB/s
# of PCIe 4.0 in both directions.
NODE = Machine("8 x H100, NVLink", "NVLink", 8, 8, 450e9, 50e9, 989e12)
FOUR_NODES = replace(NODE, name="4 nodes of them, InfiniBand", short="4 nodes, InfiniBand", gpus=32)
FOUR_ON_ETHERNET = replace(
    FOUR_NODES, name="4 nodes of them, Ethernet", short="4 nodes, Ethernet", between_nodes=12.5e9 / 8
)
SLOW_NODE = Machine("8 x A100 80 GB, PCIe", "PCIe", 8, 8, 32e9, 50e9, 312e12)
MACHINES = (NODE, SLOW_NODE, FOUR_NODES, FOUR_ON_ETHERNET)


@dataclass(frozen=True)
class Job:
    """What is trained in a step.

    Attributes:
        name: for the table.
        shape: of the model.
        multiplied: parameters that each token is multiplied by.
        rows: of a step.
        length: tokens of a row.
        recomputes: activation checkpointing.
        sums: of a layer over the tensor axis.
    """

    name: str
    shape: Shape
    multiplied: int
    rows: int
    length: int
    recomputes: bool
    sums: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by part, and GB of a GPU."""

    compute_s: float
    data_s: float
    tensor_s: float
    context_s: float
    stages_s: float
    bubble: float
    memory_gb: float

    @property
    def fits(self) -> bool:
        """Whether a GPU has that much memory."""
        return self.memory_gb * 1e9 <= GPU_BYTES

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        busy = self.compute_s + self.tensor_s + self.context_s + self.stages_s
        return max(busy / (1 - self.bubble), self.data_s)


def encoder() -> PreTrainedModel:
    """IndicBERT v2 without data."""
    with torch.device("meta"):
        return BertForSequenceClassification(BertConfig(vocab_size=250_000))


def job_of(name: str, model: PreTrainedModel, rows: int, length: int) -> Job:
    """A job of full fine-tuning; a LLaMA checkpoints its activations, as its recipes do."""
    config = model.config
    total = sum(each.numel() for each in model.parameters())
    tables = [each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    outside = max(tables) * (2 if config.model_type == "llama" else 1)  # its output layer is as large
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = config.hidden_size // config.num_attention_heads * heads
    shape = Shape(config.num_hidden_layers, config.hidden_size, width, total - outside, outside, max(tables))
    recomputes = config.model_type == "llama"
    sums = SUMS[config.model_type] + (2 if recomputes else 0)
    return Job(name, shape, total - sum(tables), rows, length, recomputes, sums)


def estimate(job: Job, sizes: Sizes, machine: Machine) -> Estimate:
    """The time and memory of a step."""
    shape, tokens = job.shape, job.rows * job.length
    own_tokens = tokens // sizes.data
    micro_batches = _micro_batches(job, sizes)
    at_once = own_tokens // micro_batches
    parameters = formulas.parameters_of_rank(shape, sizes)
    inner = sizes.tensor * sizes.context
    sums = formulas.layer_sums(shape, sizes, at_once // sizes.context, HALF, job.sums)
    keys = formulas.keys_passed(shape, sizes, at_once, HALF) / sizes.tensor
    passed = formulas.passed_on(shape, sizes, at_once // sizes.context, HALF)
    return Estimate(
        _flops(job) / sizes.world / (ACHIEVED * machine.flops),
        _data_s(parameters, sizes, machine, micro_batches),
        micro_batches * sums / machine.link(sizes.tensor),
        micro_batches * keys / machine.link(sizes.context, sizes.tensor),
        micro_batches * passed / machine.link(sizes.pipeline, inner * sizes.data),
        formulas.bubble(sizes.pipeline, micro_batches),
        (formulas.kept_bytes(parameters, sizes).total + _activations(job, sizes, at_once, micro_batches)) / 1e9,
    )


def _micro_batches(job: Job, sizes: Sizes) -> int:
    """Of a row each in a pipeline, else as few as `TOKENS_AT_ONCE` allows."""
    rows = job.rows // sizes.data
    if sizes.pipeline > 1:
        return min(rows, 32)
    return min(rows, math.ceil(rows * job.length / sizes.context / TOKENS_AT_ONCE))


def _flops(job: Job) -> float:
    """Of a step: 2 for each parameter and token forward, 4 backward (Kaplan et al. 2020, section 2.1), and those of
    attention, 2 products of tokens x length x hidden each (Narayanan et al. 2021, appendix). Recomputing adds 2."""
    shape, tokens = job.shape, job.rows * job.length
    forward = 2 * job.multiplied * tokens + 4 * shape.layers * shape.hidden * job.length * tokens
    return (4 if job.recomputes else 3) * forward


def _data_s(parameters: float, sizes: Sizes, machine: Machine, micro_batches: int) -> float:
    """Of the data axis; copies of a sharded model sum over the slower link what is left of the gradients."""
    sharded = sizes.split == "weights"
    copies = formulas.summed(parameters * FP32 / sizes.shards, sizes.replicas) if sharded else 0.0
    rest = formulas.data_bytes(parameters, sizes, FP32, HALF, micro_batches) - copies
    ring = sizes.shards if sharded else sizes.data * sizes.context
    return rest / machine.link(ring, sizes.tensor) + copies / machine.link(sizes.replicas, sizes.tensor * ring)


def _activations(job: Job, sizes: Sizes, at_once: int, micro_batches: int) -> float:
    """Bytes that the first stage keeps, in bf16: its layers' inputs and one layer at work, or all layers at work.

    A stage keeps as many micro-batches as there are stages (1F1B; Narayanan et al. 2021, section 2.2.1).
    """
    shape, tokens = job.shape, at_once / sizes.context
    layers = shape.layers / sizes.pipeline
    at_work = tokens * shape.hidden * (SPLIT_ACTIVATIONS / sizes.tensor + WHOLE_ACTIVATIONS)
    kept = layers * tokens * shape.hidden * HALF if job.recomputes else layers * at_work
    return kept * min(sizes.pipeline, micro_batches) + (at_work if job.recomputes else 0.0)


def layouts(machine: Machine) -> dict[str, Sizes]:
    """How each file splits a run over the machine's GPUs."""
    gpus, nodes = machine.gpus, machine.gpus // machine.of_node
    tensor, stages = machine.of_node, max(2, nodes)
    found = {
        "ddp": Sizes(data=gpus),
        "zero1": Sizes(data=gpus, split="states"),
        "fsdp2": Sizes(data=gpus, split="weights"),
        "tp": Sizes(tensor=tensor, data=nodes),
        "fsdp2_tp": Sizes(data=gpus // 4, tensor=4, split="weights"),
        "fsdp2_cp": Sizes(data=gpus // 4, context=4, split="weights"),
        "pipeline": Sizes(data=gpus // 4, pipeline=4),
        "pipeline, FSDP2 inside": Sizes(data=gpus // 4, pipeline=4, split="weights"),
        "3d": Sizes(data=gpus // (2 * stages), pipeline=stages, tensor=2),
    }
    return found if nodes == 1 else found | {"hsdp": Sizes(data=gpus, replicas=nodes, split="weights")}


def jobs() -> list[Job]:
    """An encoder on tweets, and two LLaMAs on conversations; the smaller one on long ones too."""
    small, large = model_of("Llama-3.1-8B"), model_of("Llama-3.1-70B")
    return [
        job_of("IndicBERT v2, 2,048 tweets", encoder(), 2048, 40),
        job_of("LLaMA 8B, 64 x 2,048 tokens", small, 64, 2048),
        job_of("LLaMA 8B, 8 x 131,072 tokens", small, 8, 131_072),
        job_of("LLaMA 70B, 64 x 2,048 tokens", large, 64, 2048),
    ]
