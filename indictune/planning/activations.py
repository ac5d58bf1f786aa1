"""Bytes of a micro-batch on a rank: activations, logits, and copies of weights in the computation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from transformers import PreTrainedConfig

from indictune.config.plan import AnyPlan
from indictune.distributed.launch import engine_of
from indictune.distributed.pipeline.schedule import GPIPE, chunks_of
from indictune.planning.kept_bytes import FP32, HALF, Types, data_shards
from indictune.planning.rank_weights import LayerWidths, Weight, layer_widths

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

    Args:
        plan: of the run.
        types: of the run.
        tokens: of a micro-batch of the rank.
        weights: of the rank.
        repeats: how often each of its layers runs.
        in_flight: micro-batches that a stage of a pipeline keeps at once.
    """
    assert plan.model_config is not None
    units = len({each.unit for each in weights} - {""})
    casts = types.computed == HALF and types.trained == FP32 and engine_of(plan.launch.strategy) != "fsdp2"
    in_fp32 = casts and (plan.model.method == "full" or types.frozen == FP32)
    at_work, cast = _layer_at_work(plan, types, casts, in_fp32, _adapted(plan, weights), max(units, 1))
    layers, inputs = in_flight * units * repeats, 0.0
    if plan.training.gradient_checkpointing or plan.training.activation_checkpointing:
        inputs, layers = layers * layer_widths(plan.model_config).hidden * (FP32 if in_fp32 else types.computed), 1.0
    return tokens * (inputs + layers * at_work + cast)


def _layer_at_work(
    plan: AnyPlan, types: Types, casts: bool, in_fp32: bool, adapted: Sequence[int], units: int
) -> tuple[float, float]:
    """Bytes of a token that one layer keeps, and those of copies that an adapter has only while it computes.

    A layer with adapters is frozen, and each adapter keeps its own input: peft (0.21) casts it to the fp32 of the
    adapter, but for 4-bit layers under autocast, and drops from that. Without both, products share what they keep.
    """
    assert plan.model_config is not None
    length, has_matrix = plan.sequence_limit, plan.model.attn_implementation == "eager"
    drops = (plan.model.lora_dropout if plan.model.dropout is None else plan.model.dropout) > 0
    adapts_fp32 = casts and (in_fp32 or plan.model.method == "lora")
    is_frozen = plan.model.method != "full" and (drops or adapts_fp32)
    widths, parts = layer_widths(plan.model_config), plan.launch.axes.tensor
    layer = layer_bytes(widths, types, in_fp32, length, has_matrix, parts, is_frozen)
    kept = types.computed + drops if is_frozen else 0
    adapters = sum(width * kept + plan.model.lora_r * types.computed for width in adapted) / units
    return layer + adapters, (1 + drops) * FP32 * max(adapted, default=0) if adapts_fp32 else 0


def _adapted(plan: AnyPlan, weights: Sequence[Weight]) -> list[int]:
    """The widths of the inputs of all adapters: the columns of their first matrix, whose rows are `--lora_r`."""
    if plan.model.method == "full":
        return []
    shapes = [each.shape for each in weights if each.is_trained and each.unit and len(each.shape) == 2]
    return [columns for rows, columns in shapes if rows == plan.model.lora_r]


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
    engine, is_sharded = engine_of(plan.launch.strategy), plan.launch.axes.is_sharded
    unpacked = max((each.numel for each in weights if each.is_packed), default=0) * HALF
    trained = sum(each.numel for each in weights if each.is_trained)
    plain = [each for each in weights if not each.is_packed]
    if engine.startswith("zero"):
        gathered = min(sum(each.numel for each in plain), _MOST_GATHERED) if engine == "zero3" else 0.0
        buckets = 2 * min(trained, _BUCKET) if engine in ("zero1", "zero2") and data_shards(plan.launch) > 1 else 0.0
        return (gathered + buckets) * types.computed + unpacked
    if engine != "fsdp2" and not is_sharded:
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
