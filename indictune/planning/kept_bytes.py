"""Bytes that a rank keeps between steps: weights, gradients and optimizer states, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.launch import engine_of
from indictune.planning.rank_weights import Weight

FP32, HALF = 4, 2
# NF4 with double quantisation: 4 bit, and apart from them an 8-bit scale for each block of 64 and a 32-bit scale for
# 256 of those (Dettmers et al. 2023, QLoRA, section 3).
NF4_BYTES, NF4_SCALES = 0.5, 1 / 64 + 4 / (64 * 256)
# AdamW keeps two fp32 values for each trained parameter; the 8-bit forms keep two bytes.
_OPTIMIZER_BYTES = {"8bit": 2.0, "adafactor": 0.0, "sgd": 0.0, "adamw": 8.0}


@dataclass(frozen=True)
class Kept:
    """Bytes of a rank, by term.

    Attributes:
        parameters: with the fp32 copies that DeepSpeed updates.
        gradients: in the backward pass, or at the optimizer's step.
        optimizer_states: of the optimizer.
        host: those of the three that are in CPU memory.
    """

    parameters: float
    gradients: float
    optimizer_states: float
    host: float = 0.0

    @property
    def on_device(self) -> float:
        """Bytes of the three on the device."""
        return self.parameters + self.gradients + self.optimizer_states


@dataclass(frozen=True)
class Types:
    """Bytes of one number of each kind.

    Attributes:
        trained: of a weight that gets a gradient.
        frozen: of another one that is not packed.
        gradient: of a gradient.
        state: of the optimizer's states of one weight.
        computed: of a weight and an activation in the computation.
        summed: of a gradient while ranks sum it.
    """

    trained: int
    frozen: int
    gradient: int
    state: float
    computed: int
    summed: int


def is_half(plan: AnyPlan) -> bool:
    """Whether the run computes in 16 bits."""
    training = plan.training  # bf16 None means bf16, unless fp16 is given
    return bool(training.bf16 is None or training.bf16 or training.fp16 or plan.model.method == "qlora")


def types_of(plan: AnyPlan) -> Types:
    """The types of a run. Trained weights are in fp32, but DeepSpeed casts all to the type of the computation.

    A classifier's frozen weights are in fp32 too (`load_classifier`); a language model's are in the type of the
    computation (`load_causal`). Under FSDP2, accelerate (1.15) sums the gradients of adapters in the latter too.
    """
    computed = HALF if is_half(plan) else FP32
    summed = HALF if plan.training.reduce_dtype == "bfloat16" else FP32
    if engine_of(plan.launch.strategy).startswith("zero"):
        return Types(computed, computed, computed, _state_bytes(plan), computed, summed)
    if _is_sharded(plan.launch) and plan.launch.axes.pipeline > 1:
        summed = FP32
    elif _is_sharded(plan.launch) and plan.model.method != "full":
        summed = computed
    frozen = computed if plan.head == "ForCausalLM" else FP32
    return Types(FP32, frozen, FP32, _state_bytes(plan), computed, summed)


def data_shards(launch: Launch) -> int:
    """Ranks that share one copy of what the data axis splits."""
    return launch.world_size // (launch.axes.pipeline * launch.axes.tensor * launch.axes.replicas)


def _is_sharded(launch: Launch) -> bool:
    """Whether FSDP2 shards the weights."""
    return engine_of(launch.strategy) == "fsdp2" or launch.axes.is_sharded


def kept_bytes(weights: Sequence[Weight], launch: Launch, types: Types, at_step: bool = False) -> Kept:
    """What a rank keeps of its weights.

    Args:
        weights: of the rank, before its data axis shards them.
        launch: of the run.
        types: of the run.
        at_step: whether gradients are those of the optimizer's step; else of the last backward pass before it.

    DDP keeps all: 16 bytes a parameter with AdamW. ZeRO (Rajbhandari et al. 2020, section 5) and FSDP2 split states,
    gradients and weights over the shards. In 16 bits ZeRO-1 keeps 4 + 12 / N bytes, ZeRO-2 2 + 14 / N, ZeRO-3 16 / N.
    """
    engine, offloads, shards = (
        engine_of(launch.strategy),
        launch.strategy.endswith("_offload"),
        data_shards(launch),
    )
    if engine.startswith("zero"):
        return _of_deepspeed(weights, int(engine[-1]), shards, offloads, types, at_step)
    parts = shards if _is_sharded(launch) else 1
    trained, frozen, packed = _kinds(weights)
    own = sum(each.share(parts) for each in trained)
    parameters: float = own * types.trained + sum(each.share(parts) for each in frozen) * types.frozen
    parameters += packed * (NF4_BYTES / parts + NF4_SCALES)  # the scales are no weights, and stay whole
    gradients, states = own * types.gradient, own * types.state
    if offloads:
        return Kept(0.0, 0.0, 0.0, host=parameters + gradients + states)
    return Kept(parameters, gradients, states)


def gradients_between(weights: Sequence[Weight], launch: Launch, types: Types) -> float:
    """Bytes of the gradients of a rank between two micro-batches of a step; arguments as of `kept_bytes`.

    FSDP2 (torch 2.13, `set_requires_gradient_sync`) scatters gradients with the last micro-batch. Before, they are
    whole and on the device, in the type of their sum.
    """
    if not _is_sharded(launch):
        return kept_bytes(weights, launch, types).gradients
    return float(sum(each.numel for each in weights if each.is_trained) * types.summed)


def _of_deepspeed(
    weights: Sequence[Weight], stage: int, shards: int, offloads: bool, types: Types, at_step: bool
) -> Kept:
    """As `kept_bytes`. DeepSpeed (0.19, `single_partition_of_fp32_groups`) updates fp32 copies of its shard of the
    weights, even where the weights are in fp32. It cuts weights into equal parts of their numbers, and makes fp32
    gradients of its shard at the step."""
    trained, frozen, packed = _kinds(weights)
    whole = sum(each.numel for each in trained)
    own = sum(math.ceil(each.numel / shards) for each in trained) if stage == 3 else math.ceil(whole / shards)
    rest = sum(math.ceil(each.numel / shards) if stage == 3 else each.numel for each in frozen)
    parameters: float = (own if stage == 3 else whole) * types.trained + rest * types.frozen
    parameters += packed * (NF4_BYTES + NF4_SCALES)
    copies, states = own * FP32, own * types.state
    gradients = own * FP32 if at_step else (whole if stage == 1 else own) * types.gradient
    if not offloads:
        return Kept(parameters + copies, gradients, states)
    on_host = copies + own * FP32 + states
    return Kept(0.0, 0.0, 0.0, on_host + parameters) if stage == 3 else Kept(parameters, 0.0, 0.0, on_host)


def _kinds(weights: Sequence[Weight]) -> tuple[list[Weight], list[Weight], int]:
    """Trained weights, frozen ones, and the number of packed ones."""
    trained = [each for each in weights if each.is_trained]
    frozen = [each for each in weights if not each.is_trained and not each.is_packed]
    return trained, frozen, sum(each.numel for each in weights if each.is_packed)


def _state_bytes(plan: AnyPlan) -> float:
    """Bytes of the optimizer's states for one trained parameter. Unknown optimizers are taken for AdamW."""
    optimizer = str(plan.training.optim)
    return next((size for name, size in _OPTIMIZER_BYTES.items() if name in optimizer), 8.0)
