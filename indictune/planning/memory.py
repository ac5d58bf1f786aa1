"""Bytes of a run on each GPU, in CPU memory and on disk, by closed forms that no GPU has calibrated yet."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from indictune.config.plan import AnyPlan
from indictune.distributed.launch import engine_of
from indictune.distributed.pipeline.layout import chunks_of
from indictune.models.config_shapes import MetaModel
from indictune.planning import rank_bytes
from indictune.planning.rank_bytes import FP32, NF4_BYTES, NF4_SCALES, gradients_between, kept_bytes, types_of
from indictune.planning.rank_weights import ModelWeights, Weight

# Of a process on a GPU: CUDA with the code of its kernels, and buffers of NCCL for each kind of group. Judgements.
CONTEXT_BYTES, NCCL_BYTES = 600_000_000, 400_000_000
# Written by `benchmarks/plan.py` on a GPU.
CALIBRATION = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by term."""

    parameters: int  # with the fp32 copies that DeepSpeed updates
    gradients: int  # of the backward pass, or between micro-batches if they take more then
    optimizer_states: int
    activations: int  # kept for the backward pass
    logits: int = 0  # and their gradient
    working_copies: int = 0  # weights that are gathered or cast, and gradients while they are summed
    framework: int = 0  # of CUDA and NCCL; 0 on a CPU

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        terms = asdict(self)
        return max(terms, key=terms.__getitem__).replace("_", " ")


class RankMemory:
    """The memory of the processes of a run, for any micro-batch. The plan has a launch and a model configuration."""

    def __init__(self, plan: AnyPlan, weights: ModelWeights) -> None:
        self.plan, self.config, self.types = plan, plan.known_config, types_of(plan)
        self.weights, axes = weights, plan.launch.axes
        chunks = chunks_of(plan.training.pipeline_schedule) if axes.pipeline > 1 else 1
        self.stages = weights.of_stages(axes, chunks)
        self.kept = [kept_bytes(each, plan.launch, self.types) for each in self.stages]
        self._between = [gradients_between(each, plan.launch, self.types) for each in self.stages]
        self._working = [rank_bytes.working_bytes(plan, each, self.types) for each in self.stages]

    @cached_property
    def heaviest(self) -> list[Weight]:
        """The weights of a rank of the stage that has most."""
        return max(self.stages, key=lambda some: sum(each.numel for each in some))

    def at(self, tokens: int, micro_batches: int) -> Memory:
        """The memory of the process that needs most, with so many tokens in its largest micro-batch of a step."""
        every = [self.of_stage(stage, tokens, micro_batches) for stage in range(len(self.stages))]
        return max(every, key=lambda each: each.total_bytes)

    def of_stage(self, stage: int, tokens: int, micro_batches: int) -> Memory:
        """As `at`, of a process of one stage: the first keeps the most micro-batches, the last has the head."""
        plan, kept, weights = self.plan, self.kept[stage], self.stages[stage]
        flight = rank_bytes.in_flight(plan, stage, micro_batches)
        has_logits = plan.head == "ForCausalLM" and stage == len(self.stages) - 1
        groups = NCCL_BYTES if plan.launch.world_size > 1 else 0
        return Memory(
            int(kept.parameters),
            int(max(kept.gradients, self._between[stage]) if micro_batches > 1 else kept.gradients),
            int(kept.optimizer_states),
            int(rank_bytes.activation_bytes(plan, self.types, tokens, weights, self.weights.repeats, flight)),
            rank_bytes.logits_bytes(self.config, self.types, tokens) if has_logits else self._masked_logits(tokens),
            int(self._working[stage]),
            CONTEXT_BYTES + groups if plan.gpus else 0,
        )

    def _masked_logits(self, tokens: int) -> int:
        """Bytes of the logits of masked tokens, their probabilities and their gradient; 0 for another task."""
        share = self.plan.configuration.get("mlm_probability", 0) if self.plan.head == "ForMaskedLM" else 0
        return int(3 * FP32 * share * tokens * self.config.vocab_size)


def row_limit(plan: AnyPlan) -> int:
    """Most tokens of a training row: each conversation of a pair of answers has up to `--max_length`."""
    return plan.sequence_limit * (2 if plan.configuration.get("task") in ("dpo", "reward") else 1)


def micro_batch_tokens(plan: AnyPlan, longest: int) -> int:
    """Most tokens in a micro-batch of one process, if all rows were as long as the longest."""
    training = plan.training
    if training.max_tokens_per_device is not None:
        return training.max_tokens_per_device
    in_windows = plan.configuration.get("long_text") == "window"  # a row has all its windows
    longest = longest if in_windows else min(longest, row_limit(plan))
    return math.ceil(training.per_device_train_batch_size * longest / plan.launch.axes.context)


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of the first node, which needs most."""

    offloaded: float  # weights, gradients and states that live there
    loading: float  # whole weights that its processes hold when the run starts
    reading_back: float  # the saved model, which the first process compares with the trained one at the end

    @property
    def needed(self) -> float:
        """At one time. Nothing else is offloaded yet while weights are read."""
        return max(self.loading, self.offloaded + self.reading_back)


def node_memory(memory: RankMemory, of_node: int) -> NodeMemory:
    """The CPU memory of a node with so many processes, without that of Python and its libraries.

    Every process reads all weights, but where the first one sends the others theirs: under ZeRO-3 (transformers 5.23),
    and for a language model under FSDP2 or in stages and tensor parts. A quantised base is always read by all.
    """
    plan, types, whole = memory.plan, memory.types, memory.weights.every
    launch, axes = plan.launch, plan.launch.axes
    packed = sum(each.numel for each in whole if each.is_packed) * (NF4_BYTES + NF4_SCALES)
    plain = [each for each in whole if not each.is_packed]
    is_causal = plan.head == "ForCausalLM"
    read = packed + sum(each.numel * (FP32 if each.is_trained or not is_causal else types.frozen) for each in plain)
    saved = packed + sum(each.numel for each in plain) * (types.computed if is_causal else FP32)
    kept_at_most = max(each.host for each in memory.kept) * of_node
    is_sent = engine_of(launch.strategy) == "fsdp2" or (axes.pipeline * axes.tensor > 1 and launch.deepspeed is None)
    reads_once = engine_of(launch.strategy) == "zero3" or (is_sent and is_causal)
    readers = 1 if reads_once and plan.model.method != "qlora" else of_node
    return NodeMemory(kept_at_most, read * readers, saved)


@dataclass(frozen=True)
class WrittenBytes:
    """Bytes on disk, over all nodes."""

    checkpoint: float  # weights, optimizer states and DeepSpeed's fp32 copies; of an adapter without its base
    model: float  # that a run saves at its end; an adapter is saved without its base


def written_bytes(plan: AnyPlan, weights: ModelWeights) -> WrittenBytes:
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
    return WrittenBytes(model + trained * (copies + types.state), model)


def checkpoint_of_node(plan: AnyPlan, meta: MetaModel) -> int:
    """Bytes of a checkpoint that the processes of one node write. One node writes all that is not split."""
    launch, split = plan.launch, plan.launch.axes.tensor * plan.launch.axes.pipeline > 1
    is_split = split or engine_of(launch.strategy) in ("fsdp2", "zero1", "zero2", "zero3")
    nodes = max(1, launch.world_size // launch.local_world_size) if is_split else 1
    return int(written_bytes(plan, ModelWeights(meta)).checkpoint / nodes)


def calibration(path: Path = CALIBRATION) -> str:
    """In words for the user: hardware, date, number of settings and largest error, if any were measured."""
    if not path.exists():
        return "not calibrated on a GPU"
    content = json.loads(path.read_text(encoding="utf-8"))
    about, settings = content["environment"], content["settings"]
    error = max(abs(each["predicted"] / each["measured"] - 1) for each in settings)
    return f"within {error:.0%} of the peaks of {len(settings)} settings on {about['gpus'][0]}, {about['date']}"
