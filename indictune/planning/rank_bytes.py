"""Bytes on a rank, in closed form: weights, gradients and optimizer states, and the activations of a micro-batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.devices import dtype_of
from indictune.distributed.launch import engine_of
from indictune.distributed.pipeline.layout import GPIPE, chunks_of
from indictune.planning.rank_weights import LayerWidths, Weight, layer_widths

FP32, HALF = 4, 2
# NF4 with double quantisation: 4 bit, and apart from them an 8-bit scale for each block of 64 and a 32-bit scale for
# 256 of those (Dettmers et al. 2023, QLoRA, section 3).
NF4_BYTES, NF4_SCALES = 0.5, 1 / 64 + 4 / (64 * 256)
# AdamW keeps two fp32 values for each trained parameter; the 8-bit forms keep two bytes.
_OPTIMIZER_BYTES = {"8bit": 2.0, "adafactor": 0.0, "sgd": 0.0, "adamw": 8.0}


@dataclass(frozen=True)
class Kept:
    """Bytes of a rank, by term."""

    parameters: float  # with the fp32 copies that DeepSpeed updates
    gradients: float  # in the backward pass, or at the optimizer's step
    optimizer_states: float
    host: float = 0.0  # those of the three that are in CPU memory


@dataclass(frozen=True)
class Types:
    """Bytes of one number of each kind."""

    trained: int  # of a weight that gets a gradient
    frozen: int  # of another one that is not packed
    gradient: int
    state: float  # of the optimizer's states of one weight
    computed: int  # of a weight and an activation in the computation
    summed: int  # of a gradient while ranks sum it


def is_half(plan: AnyPlan) -> bool:
    """Whether the run computes in 16 bits."""
    return dtype_of(plan.training) != "float32" or plan.model.method == "qlora"


def types_of(plan: AnyPlan) -> Types:
    """The types of a run. Trained weights are in fp32, but DeepSpeed casts all to the type of the computation.

    A classifier's frozen weights are in fp32 too (`load_classifier`); a language model's are in the type of the
    computation (`load_causal`). Under FSDP2, accelerate (1.15) sums the gradients of adapters in the latter too.
    """
    computed = HALF if is_half(plan) else FP32
    summed = HALF if plan.training.reduce_dtype == "bfloat16" else FP32
    if engine_of(plan.launch.strategy).startswith("zero"):
        return Types(computed, computed, computed, _state_bytes(plan), computed, summed)
    if is_sharded(plan.launch) and plan.launch.axes.pipeline > 1:
        summed = FP32
    elif is_sharded(plan.launch) and plan.model.method != "full":
        summed = computed
    frozen = computed if plan.head == "ForCausalLM" else FP32
    return Types(FP32, frozen, FP32, _state_bytes(plan), computed, summed)


def data_shards(launch: Launch) -> int:
    """Ranks that share one copy of what the data axis splits."""
    return launch.world_size // (launch.axes.pipeline * launch.axes.tensor * launch.axes.replicas)


def is_sharded(launch: Launch) -> bool:
    """Whether FSDP2 shards the weights of a rank."""
    return engine_of(launch.strategy) == "fsdp2" or launch.axes.is_sharded


def kept_bytes(weights: Sequence[Weight], launch: Launch, types: Types, at_step: bool = False) -> Kept:
    """What a rank keeps of its weights, before its data axis shards them.

    Gradients are those of the optimizer's step, or of the last backward pass before it.

    DDP keeps all: 16 bytes a parameter with AdamW. ZeRO (Rajbhandari et al. 2020, section 5) and FSDP2 split states,
    gradients and weights over the shards. In 16 bits ZeRO-1 keeps 4 + 12 / N bytes, ZeRO-2 2 + 14 / N, ZeRO-3 16 / N.
    """
    engine, offloads = engine_of(launch.strategy), launch.strategy.endswith("_offload")
    shards = data_shards(launch)
    if engine.startswith("zero"):
        return _of_deepspeed(weights, int(engine[-1]), shards, offloads, types, at_step)
    parts = shards if is_sharded(launch) else 1
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
    if not is_sharded(launch):
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


# TRL (1.16, `kernels/chunked_logprob.py`) computes the logits of this many tokens and words at once. Its buffer is as
# wide for a smaller vocabulary. On a GPU, a Triton kernel turns the logits into their gradient in place.
_LOGITS_AT_ONCE = 4096, 32768
# Weights that DeepSpeed (0.19) sums, and that ZeRO-3 keeps gathered, at once: defaults of `reduce_bucket_size` and
# `stage3_max_live_parameters`.
_BUCKET, _MOST_GATHERED = 5e8, 1e9


def layer_bytes(
    widths: LayerWidths,
    types: Types,
    casts: bool,
    length: int,
    has_matrix: bool,
    parts: int = 1,
    is_frozen: bool = False,
) -> float:
    """Bytes that one layer keeps of a token for the backward pass.

    In 16 bits a layer of BERT keeps 18 x hidden + 4 x inner: 34 x hidden where inner is 4 x hidden (Korthikanti et al.
    2022, section 4.1). A gated layer of LLaMA keeps 20 x hidden + 4 x keys + 8 x inner, of which its norms keep 4 x
    hidden in fp32 anyway: tests compare both with autograd. Tensor parallelism splits all but 10 x hidden (4.2).

    Args:
        widths: of the model.
        types: of the run.
        casts: whether fp32 states between layers are cast for each product, as under autocast.
        length: tokens of a row.
        has_matrix: whether the attention keeps its matrix: 5 bytes for each head and token of the row.
        parts: of the tensor axis.
        is_frozen: whether its weights are: it does not keep what only their gradients need, the inputs of products.
    """
    hidden, inner = widths.hidden, widths.inner
    if widths.is_gated:
        whole, split = (8, 4 * hidden + 6 * inner) if is_frozen else (10, 10 * hidden + 8 * inner)
        split += 4 * widths.key_values
        in_fp32 = 0 if is_frozen else 10
    else:
        whole, split = (6, 8 * hidden + 2 * inner) if is_frozen else (10, 8 * hidden + 4 * inner)
        in_fp32 = 4 if is_frozen else 8
    split += 5 * widths.heads * length if has_matrix else 0
    in_half = whole * hidden + split / parts
    if types.computed == FP32:
        return 2 * in_half - (8 * hidden if widths.is_gated else 0)
    return in_half + (in_fp32 * hidden if casts else 0)


def activation_bytes(
    plan: AnyPlan, types: Types, tokens: int, weights: Sequence[Weight], repeats: float, in_flight: int = 1
) -> float:
    """Bytes that a rank keeps of its layers. With checkpointing: the input of each layer, and one whole layer.

    The tokens are those of a micro-batch of the rank. Each layer of its weights runs some times. A stage of a pipeline
    keeps several micro-batches at once.
    """
    units = len({each.unit for each in weights} - {""})
    casts = types.computed == HALF and types.trained == FP32 and engine_of(plan.launch.strategy) != "fsdp2"
    in_fp32 = casts and (plan.model.method == "full" or types.frozen == FP32)
    shapes = [each.shape for each in weights if each.is_trained and each.unit and len(each.shape) == 2]
    # The widths of the inputs of all adapters: the columns of their first matrix, whose rows are `--lora_r`.
    adapted = [columns for rows, columns in shapes if plan.model.method != "full" and rows == plan.model.lora_r]
    at_work, cast = _layer_at_work(plan, types, casts, in_fp32, adapted, max(units, 1))
    layers, inputs = in_flight * units * repeats, 0.0
    if plan.training.gradient_checkpointing or plan.training.activation_checkpointing:
        inputs, layers = layers * layer_widths(plan.known_config).hidden * (FP32 if in_fp32 else types.computed), 1.0
    return tokens * (inputs + layers * at_work + cast)


def _layer_at_work(
    plan: AnyPlan, types: Types, casts: bool, in_fp32: bool, adapted: Sequence[int], units: int
) -> tuple[float, float]:
    """Bytes of a token that one layer keeps, and those of copies that an adapter has only while it computes.

    A layer with adapters is frozen, and each adapter keeps its own input: peft (0.21) casts it to the fp32 of the
    adapter, but for 4-bit layers under autocast, and drops from that. Without both, products share what they keep.
    """
    length, has_matrix = plan.sequence_limit, plan.model.attn_implementation == "eager"
    drops = (plan.model.lora_dropout if plan.model.dropout is None else plan.model.dropout) > 0
    adapts_fp32 = casts and (in_fp32 or plan.model.method == "lora")
    is_frozen = plan.model.method != "full" and (drops or adapts_fp32)
    widths, parts = layer_widths(plan.known_config), plan.launch.axes.tensor
    layer = layer_bytes(widths, types, in_fp32, length, has_matrix, parts, is_frozen)
    kept = types.computed + drops if is_frozen else 0
    adapters = sum(width * kept + plan.model.lora_r * types.computed for width in adapted) / units
    return layer + adapters, (1 + drops) * FP32 * max(adapted, default=0) if adapts_fp32 else 0


def in_flight(plan: AnyPlan, stage: int, micro_batches: int) -> int:
    """Micro-batches of which a stage keeps activations at once: 1F1B keeps one for each stage that follows it."""
    stages = plan.launch.axes.pipeline
    if stages == 1:
        return 1
    schedule = plan.training.pipeline_schedule
    if schedule == GPIPE:
        return micro_batches
    ahead = stages - stage if chunks_of(schedule) == 1 else 2 * (stages - stage) + stages
    return min(micro_batches, ahead)


def logits_bytes(config: PreTrainedConfig, types: Types, tokens: int) -> int:
    """Bytes of one piece of logits, which becomes its gradient, and of the fp32 gradient of the last states."""
    most_tokens, most_words = _LOGITS_AT_ONCE
    return min(tokens, most_tokens) * most_words * types.computed + tokens * layer_widths(config).hidden * FP32


def working_bytes(plan: AnyPlan, weights: Sequence[Weight], types: Types) -> float:
    """Bytes of weights and gradients that a rank has only while it computes.

    - Autocast keeps a 16-bit copy of each fp32 matrix until the backward pass has used it.
    - FSDP2 gathers two layers and what is outside of layers. The gradients of a layer are whole until they are
      scattered.
    - ZeRO-3 keeps up to 1e9 gathered weights. ZeRO sums gradients in two buckets of up to 5e8.
    - QLoRA unpacks a matrix at a time.
    """
    engine = engine_of(plan.launch.strategy)
    unpacked = max((each.numel for each in weights if each.is_packed), default=0) * HALF
    trained = sum(each.numel for each in weights if each.is_trained)
    plain = [each for each in weights if not each.is_packed]
    if engine.startswith("zero"):
        gathered = min(sum(each.numel for each in plain), _MOST_GATHERED) if engine == "zero3" else 0.0
        buckets = 2 * min(trained, _BUCKET) if engine in ("zero1", "zero2") and data_shards(plan.launch) > 1 else 0.0
        return (gathered + buckets) * types.computed + unpacked
    if not is_sharded(plan.launch):
        cast = [each for each in plain if not each.is_looked_up and len(each.shape) == 2]
        in_fp32 = [each for each in cast if (types.trained if each.is_trained else types.frozen) == FP32]
        return unpacked + (sum(each.numel for each in in_fp32) * HALF if types.computed == HALF else 0.0)
    units, of_unit = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in weights:
        units[each.unit] += each.numel * (types.computed if not each.is_packed else 0.5)
        of_unit[each.unit] += each.numel if each.is_trained else 0
    outside = units.pop("", 0.0)
    largest = max(units.values(), default=0)
    scattered = max(of_unit.values(), default=0) * (types.computed + types.summed)
    return outside + 2 * largest + scattered + unpacked
