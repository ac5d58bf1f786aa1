"""The estimate of a run's memory against counts and formulas worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig

from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.plan import AnyPlan, Axes, Launch, unresolved
from indictune.distributed.memory import estimate_memory, micro_batch_tokens
from indictune.models.parameter_counts import ParameterCounts, count_parameters
from tests.plans import plan_of

LLAMA = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip
LINEAR = 2 * (4 * 64 * 64 + 3 * 64 * 128)
NORMS = 2 * 2 * 64 + 64
COUNTS = ParameterCounts(total=7_000_000_000, trained=7_000_000_000)


def planned(launch: Launch | None = None, method: str = "full", max_length: int = 128, **training: Any) -> AnyPlan:
    plan = plan_of(training, {"method": method}, launch)
    data = unresolved(DataArguments, {"max_length": max_length})
    return replace(plan, data=data, model_config=LLAMA)


def bytes_of(launch: Launch, counts: ParameterCounts = COUNTS, **given: Any) -> list[float]:
    """Parameters, gradients and optimizer states in units of 1e9 bytes."""
    plan = planned(launch, **given)
    memory = estimate_memory(plan, counts, tokens=10)
    return [each / 1e9 for each in (memory.parameters, memory.gradients, memory.optimizer_states)]


def test_all_parameters_are_counted_once() -> None:
    counts = count_parameters(ModelArguments(), LLAMA, "ForCausalLM")
    assert counts == ParameterCounts(100 * 64 + LINEAR + NORMS, 100 * 64 + LINEAR + NORMS)


def test_an_adapter_trains_its_matrices_and_packs_the_linear_layers() -> None:
    counts = count_parameters(ModelArguments(method="qlora", lora_r=4), LLAMA, "ForCausalLM")
    matrices = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    assert counts == ParameterCounts(100 * 64 + LINEAR + NORMS + matrices, matrices, LINEAR)


def test_a_classifier_trains_its_head_beside_an_adapter() -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    config.num_labels = 3
    counts = count_parameters(ModelArguments(method="lora", lora_r=2), config, "ForSequenceClassification")
    matrices = 2 * (5 * (32 + 32) + 2 * (32 + 64))  # query, key, value, output, pooler; up and down
    assert counts.trained == matrices + 32 * 3 + 3


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("single", [28, 28, 56]),
        ("ddp", [28, 28, 56]),  # 16 bytes a parameter
        ("zero1", [28, 28, 7]),
        ("zero2", [28, 3.5, 7]),
        ("zero3", [3.5, 3.5, 7]),  # 16 / N
        ("fsdp2", [3.5, 3.5, 7]),
        ("zero2_offload", [28, 3.5, 0]),
        ("fsdp2_offload", [0, 3.5, 0]),
    ],
)
def test_a_7b_model_on_8_processes(strategy: str, expected: list[float]) -> None:
    assert bytes_of(Launch(strategy, 1 if strategy == "single" else 8, 8)) == pytest.approx(expected)


def test_each_copy_of_a_sharded_model_takes_the_memory_of_its_own_shards() -> None:
    launch = Launch("hsdp", 8, 4, axes=Axes(replicas=2, is_sharded=True))
    assert bytes_of(launch) == pytest.approx([7, 7, 14])


def test_a_packed_base_takes_about_half_a_byte_a_parameter() -> None:
    counts = ParameterCounts(total=7_100_000_000, trained=100_000_000, packed=7_000_000_000)
    parameters, gradients, states = bytes_of(Launch("single"), counts, method="qlora", bf16=True)
    assert parameters == pytest.approx(7 * (0.5 + 0.015625 + 0.000244140625) + 0.2)
    assert (gradients, states) == pytest.approx((0.4, 0.8))


@pytest.mark.parametrize(
    ("bf16", "checkpointing", "expected"),
    [(True, False, 2 * 10 * 64 * 34), (False, False, 2 * 2 * 10 * 64 * 34), (True, True, 10 * 64 * (34 + 2 * 2))],
)
def test_activations_grow_with_tokens(bf16: bool, checkpointing: bool, expected: int) -> None:
    plan = planned(bf16=bf16, gradient_checkpointing=checkpointing)
    assert estimate_memory(plan, COUNTS, tokens=10).activations == expected


def test_the_largest_term_is_named() -> None:
    memory = estimate_memory(planned(), COUNTS, tokens=10)
    assert memory.largest == "optimizer states"
    assert memory.total_bytes == 7e9 * 16 + memory.activations


def test_tokens_of_a_micro_batch() -> None:
    assert micro_batch_tokens(planned(per_device_train_batch_size=8, max_length=128), longest=40) == 320
    assert micro_batch_tokens(planned(per_device_train_batch_size=8, max_length=32), longest=40) == 256
    assert micro_batch_tokens(planned(max_tokens_per_device=500), longest=40) == 500
