"""Estimate the memory that training takes on each process, by closed forms that no GPU has calibrated yet."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from transformers import PreTrainedConfig

from indictune.config.plan import AnyPlan
from indictune.distributed.engines import engine_of
from indictune.models.parameter_counts import ParameterCounts

# Bytes of one parameter in NF4 with double quantisation: 4 bit, an 8-bit scale for each block of 64, and a 32-bit
# scale for 256 of those (Dettmers et al. 2023, QLoRA, section 3).
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# AdamW keeps two fp32 values for each trained parameter; the 8-bit forms keep two bytes.
_OPTIMIZER_BYTES = {"8bit": 2.0, "adafactor": 0.0, "sgd": 0.0, "adamw": 8.0}
# Activations of one transformer layer are 34 bytes per token and hidden unit in 16-bit types, without the attention
# matrix, which fused kernels do not keep (Korthikanti et al. 2022, section 4.1).
_ACTIVATION_BYTES = 34
# TRL (1.16, `kernels/chunked_logprob.py`) computes the logits of this many tokens and words of the vocabulary at once.
_LOGITS_AT_ONCE = 4096, 32768


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by term. Host memory of offloaded terms is not counted."""

    parameters: int
    gradients: int
    optimizer_states: int
    activations: int
    logits: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        terms = asdict(self)
        return max(terms, key=terms.__getitem__).replace("_", " ")


def estimate_memory(plan: AnyPlan, counts: ParameterCounts, tokens: int) -> Memory:
    """The memory of one process.

    Args:
        plan: of the run, with its launch and its model configuration.
        counts: parameters of the model.
        tokens: in the largest micro-batch of one process.
    """
    assert plan.model_config is not None
    stored_bytes = 4 if plan.model.method == "full" or not _is_half(plan) else 2
    parameters = (counts.total - counts.packed) * stored_bytes + counts.packed * _NF4_BYTES
    gradients = counts.trained * 4.0
    states = counts.trained * _state_bytes(str(plan.training.optim))
    launch = plan.launch
    parts = launch.axes.tensor * launch.axes.pipeline
    parameters, gradients, states = parameters / parts, gradients / parts, states / parts
    shards = launch.world_size // (parts * launch.axes.replicas)
    family, offloads = engine_of(plan.launch.strategy), plan.launch.strategy.endswith("_offload")
    if family in ("fsdp2", "zero3"):
        parameters = 0 if offloads and family == "fsdp2" else parameters / shards
    if family in ("fsdp2", "zero2", "zero3"):
        gradients /= shards
    if family in ("fsdp2", "zero1", "zero2", "zero3"):
        states = 0 if offloads else states / shards
    checkpointing = bool(plan.training.gradient_checkpointing or plan.training.activation_checkpointing)
    activations = _activation_bytes(plan.model_config, tokens, _is_half(plan), checkpointing)
    logits = _logits_bytes(plan.model_config, tokens) if plan.head == "ForCausalLM" else 0
    return Memory(int(parameters), int(gradients), int(states), activations, logits)


def checkpoint_bytes(plan: AnyPlan, counts: ParameterCounts) -> int:
    """Size of the part of a checkpoint that the processes of one node write: weights and optimizer states.

    Where they are not split, one node writes all.
    """
    weights = counts.total if plan.model.method == "full" else counts.trained
    launch, split = plan.launch, plan.launch.axes.tensor * plan.launch.axes.pipeline > 1
    is_split = split or engine_of(launch.strategy) in ("fsdp2", "zero1", "zero2", "zero3")
    nodes = max(1, launch.world_size // launch.local_world_size) if is_split else 1
    return int((weights * 4 + counts.trained * _state_bytes(str(plan.training.optim))) / nodes)


def micro_batch_tokens(plan: AnyPlan, longest: int) -> int:
    """Most tokens in a micro-batch of one process, if all rows were as long as the longest."""
    training = plan.training
    if training.max_tokens_per_device is not None:
        return training.max_tokens_per_device
    in_windows = plan.configuration.get("long_text") == "window"  # a row has all its windows
    longest = longest if in_windows else min(longest, plan.sequence_limit)
    return math.ceil(training.per_device_train_batch_size * longest / plan.launch.axes.context)


def _is_half(plan: AnyPlan) -> bool:
    training = plan.training  # bf16 None means bf16, unless fp16 is given
    return bool(training.bf16 is None or training.bf16 or training.fp16 or plan.model.method == "qlora")


def _state_bytes(optimizer: str) -> float:
    """Bytes of the optimizer's states for one trained parameter. Unknown optimizers are taken for AdamW."""
    return next((size for name, size in _OPTIMIZER_BYTES.items() if name in optimizer), 8.0)


def _activation_bytes(config: PreTrainedConfig, tokens: int, half: bool, checkpointing: bool) -> int:
    """Bytes kept for the backward pass. With checkpointing: the input of each layer, and one whole layer."""
    of_text = config.get_text_config()
    per_layer = tokens * of_text.hidden_size * _ACTIVATION_BYTES
    inputs = tokens * of_text.hidden_size * 2
    layers: int = of_text.num_hidden_layers
    in_half: int = per_layer + layers * inputs if checkpointing else layers * per_layer
    return in_half if half else 2 * in_half


def _logits_bytes(config: PreTrainedConfig, tokens: int) -> int:
    """Bytes of one piece of logits in fp32 and of its gradient."""
    most_tokens, most_words = _LOGITS_AT_ONCE
    words: int = config.get_text_config().vocab_size
    return min(tokens, most_tokens) * min(words, most_words) * 4 * 2
