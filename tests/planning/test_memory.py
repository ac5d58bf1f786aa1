"""The estimate of a run's memory against closed forms, real models and counts worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import TaskType
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
)

from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.plan import AnyPlan, Axes, Launch, unresolved
from indictune.models.adapters import add_lora
from indictune.models.config_shapes import MetaModel, ParameterCounts, meta_model
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_causal
from indictune.planning.machine_failures import held_bytes
from indictune.planning.memory import Memory, RankMemory, micro_batch_tokens
from indictune.planning.rank_bytes import Kept, in_flight, kept_bytes, layer_bytes, types_of, working_bytes
from indictune.planning.rank_weights import ModelWeights, Weight, layer_widths
from tests.plans import plan_of

LLAMA = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip
LINEAR = 2 * (4 * 64 * 64 + 3 * 64 * 128)
NORMS = 2 * 2 * 64 + 64
BERT = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
ALBERT = AlbertConfig(
    vocab_size=50, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64
)
SHARDED = Axes(is_sharded=True)
BILLIONS = [Weight((7_000_000, 1000))]  # 7e9


def planned(launch: Launch | None = None, method: str = "full", max_length: int = 128, **training: Any) -> AnyPlan:
    plan = plan_of(training, {"method": method}, launch)
    data = unresolved(DataArguments, {"max_length": max_length})
    return replace(plan, data=data, model_config=LLAMA, head="ForCausalLM")


def kept_of(launch: Launch, weights: list[Weight] | None = None, at_step: bool = False, **given: Any) -> Kept:
    plan = planned(launch, **given)
    return kept_bytes(weights or BILLIONS, launch, types_of(plan), at_step)


def estimate_memory(plan: AnyPlan, meta: MetaModel, tokens: int) -> Memory:
    return RankMemory(plan, ModelWeights(meta)).at(tokens, plan.training.gradient_accumulation_steps)


def on_device(kept: Kept) -> float:
    return kept.parameters + kept.gradients + kept.optimizer_states


def test_all_parameters_are_counted_once() -> None:
    counts = meta_model(ModelArguments(), LLAMA, "ForCausalLM").counts
    assert counts == ParameterCounts(100 * 64 + LINEAR + NORMS, 100 * 64 + LINEAR + NORMS)


def test_an_adapter_trains_its_matrices_and_packs_the_linear_layers() -> None:
    counts = meta_model(ModelArguments(method="qlora", lora_r=4), LLAMA, "ForCausalLM").counts
    matrices = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
    assert counts == ParameterCounts(100 * 64 + LINEAR + NORMS + matrices, matrices, LINEAR)


def test_a_classifier_trains_its_head_beside_an_adapter() -> None:
    config = replace_layers(BERT, 1)
    config.num_labels = 3
    counts = meta_model(ModelArguments(method="lora", lora_r=2), config, "ForSequenceClassification").counts
    matrices = 2 * (5 * (32 + 32) + 2 * (32 + 64))  # query, key, value, output, pooler; up and down
    assert counts.trained == matrices + 32 * 3 + 3


def replace_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    values = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    return type(config)(**{**values, "num_hidden_layers": layers})


def test_an_active_vocabulary_replaces_the_embedding() -> None:
    whole, active = (
        meta_model(ModelArguments(), BERT, "ForSequenceClassification", rows).counts for rows in (None, 20)
    )
    assert whole.total - active.total == (50 - 20) * 32


@pytest.mark.parametrize(
    ("strategy", "parameter_bytes"),
    [
        ("single", 16),
        ("ddp", 16),  # Rajbhandari et al. 2020, section 3.1
        ("zero1", 4 + 12 / 8),
        ("zero2", 2 + 14 / 8),
        ("zero3", 16 / 8),
        ("fsdp2", 16 / 8),
        ("zero2_offload", 2),
        ("zero3_offload", 0),
        ("fsdp2_offload", 0),
    ],
)
def test_bytes_a_parameter_of_mixed_precision_adam_on_8_processes(strategy: str, parameter_bytes: float) -> None:
    axes = SHARDED if strategy.startswith("fsdp2") else Axes()
    launch = Launch(strategy, 1 if strategy == "single" else 8, 8, axes=axes)
    kept = kept_of(launch, bf16=True)
    assert on_device(kept) / 7e9 == pytest.approx(parameter_bytes)


def test_7_billion_parameters_take_112_gb_or_14_gb_on_8_gpus() -> None:
    assert on_device(kept_of(Launch("ddp", 8, 8), bf16=True)) == 112e9
    assert on_device(kept_of(Launch("zero3", 8, 8), bf16=True)) == 14e9


@pytest.mark.parametrize(
    ("strategy", "axes", "expected"),
    [
        ("zero1", Axes(), [28 + 3.5, 28, 7]),  # in fp32 DeepSpeed keeps copies of its shard too
        ("zero2", Axes(), [28 + 3.5, 3.5, 7]),
        ("zero3", Axes(), [3.5 + 3.5, 3.5, 7]),
        ("fsdp2", SHARDED, [3.5, 3.5, 7]),
        ("hsdp", Axes(replicas=2, is_sharded=True), [7, 7, 14]),  # each copy has shards of its own
        ("pipeline", Axes(pipeline=4, is_sharded=True), [14, 14, 28]),  # shards of a stage's weights on 2 processes
    ],
)
def test_billions_of_bytes_by_term_in_fp32(strategy: str, axes: Axes, expected: list[float]) -> None:
    kept = kept_of(Launch(strategy, 8, 4, axes=axes), bf16=False)
    assert [kept.parameters / 1e9, kept.gradients / 1e9, kept.optimizer_states / 1e9] == pytest.approx(expected)


def test_offloaded_bytes_are_in_cpu_memory() -> None:
    assert kept_of(Launch("zero2_offload", 8, 8), bf16=True).host == pytest.approx(7e9 * (4 + 4 + 8) / 8)
    assert kept_of(Launch("zero3_offload", 8, 8), bf16=True).host == pytest.approx(7e9 * (2 + 4 + 4 + 8) / 8)
    assert kept_of(Launch("fsdp2_offload", 8, 8, axes=SHARDED), bf16=True).host == pytest.approx(7e9 * 16 / 8)


def test_deepspeed_makes_fp32_gradients_of_its_shard_at_the_step() -> None:
    launch = Launch("zero1", 8, 8)
    assert kept_of(launch, bf16=True).gradients == 7e9 * 2
    assert kept_of(launch, at_step=True, bf16=True).gradients == 7e9 * 4 / 8


def test_the_largest_shard_has_the_odd_rows() -> None:
    kept = kept_of(Launch("fsdp2", 4, 4, axes=SHARDED), [Weight((5, 10)), Weight((1,))], bf16=False)
    assert kept.parameters == 4 * (2 * 10 + 1)


def test_the_scales_of_a_packed_base_are_not_sharded() -> None:
    packed = [Weight((7_000_000, 1000), is_trained=False, is_packed=True)]
    scales = 7e9 * (1 / 64 + 4 / (64 * 256))
    assert on_device(kept_of(Launch("single"), packed, method="qlora")) == pytest.approx(7e9 / 2 + scales)
    sharded = kept_of(Launch("fsdp2", 8, 8, axes=SHARDED), packed, method="qlora")
    assert on_device(sharded) == pytest.approx(7e9 / 2 / 8 + scales)


@pytest.mark.parametrize(("optim", "state"), [("adamw_torch", 8), ("paged_adamw_8bit", 2), ("sgd", 0)])
def test_states_by_optimizer(optim: str, state: int) -> None:
    assert kept_of(Launch("single"), optim=optim).optimizer_states == 7e9 * state


class TestRealModels:
    """What models of this process hold, against the estimate."""

    @pytest.mark.parametrize(
        ("config", "rows"), [(BERT, None), (BERT, 20), (ALBERT, None)], ids=["bert", "active vocabulary", "albert"]
    )
    def test_full_training_of_a_classifier(self, config: PreTrainedConfig, rows: int | None) -> None:
        model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
        if rows is not None:
            model.set_input_embeddings(torch.nn.Embedding(rows, 32))
        optimizer = torch.optim.AdamW(model.parameters())
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        optimizer.step()
        plan = replace(planned(), model_config=config, head="ForSequenceClassification")
        memory = estimate_memory(plan, meta_model(plan.model, config, plan.head, rows), tokens=10)
        held = held_bytes(model, optimizer)
        assert held == {name: getattr(memory, name) for name in held}

    @pytest.mark.parametrize("method", ["full", "lora", "qlora"])
    def test_a_language_model_by_method(self, method: str) -> None:
        args = ModelArguments("builtin:tiny-indic-llama", method=method)  # type: ignore[arg-type]
        model = load_causal(args, load_tokenizer(args), torch.bfloat16, [2])
        trained = [each for each in model.parameters() if each.requires_grad]
        for each in trained:
            each.grad = torch.zeros_like(each)
        optimizer = torch.optim.AdamW(trained)
        optimizer.step()
        plan = replace(plan_of({"bf16": True}, {"method": method}), head="ForCausalLM")
        plan = replace(plan, model_config=model.config, model=args)
        memory = estimate_memory(plan, meta_model(args, model.config, plan.head), tokens=10)
        held = held_bytes(model, optimizer)
        assert memory.parameters == pytest.approx(held["parameters"], rel=0.02)
        assert (memory.gradients, memory.optimizer_states) == (held["gradients"], held["optimizer_states"])

    def test_modules_that_an_adapter_trains_whole_are_held_twice(self) -> None:
        """peft keeps the frozen module too."""
        args = ModelArguments("builtin:tiny-indic-llama", method="lora", modules_to_save=["embed_tokens"])
        model = load_causal(args, load_tokenizer(args), torch.bfloat16, [2])
        counts = meta_model(args, model.config, "ForCausalLM").counts
        assert counts.total == sum(each.numel() for each in model.parameters())
        assert counts.trained == sum(each.numel() for each in model.parameters() if each.requires_grad)

    def test_tied_embeddings_are_held_once(self) -> None:
        model: Any = AutoModelForCausalLM.from_config(LLAMA)  # type: ignore[no-untyped-call]
        counts = meta_model(ModelArguments(), LLAMA, "ForCausalLM").counts
        assert held_bytes(model)["parameters"] == 4 * counts.total


def stages_of(config: PreTrainedConfig, axes: Axes, method: str = "full") -> list[int]:
    args = ModelArguments(method=method)  # type: ignore[arg-type]
    head = "ForCausalLM" if isinstance(config, LlamaConfig) else "ForSequenceClassification"
    weights = ModelWeights(meta_model(args, config, head))
    return [sum(each.numel for each in some) for some in weights.of_stages(axes)]


def test_stages_share_all_weights_and_hold_a_tied_table_twice() -> None:
    whole = meta_model(ModelArguments(), BERT, "ForSequenceClassification").counts.total
    assert sum(stages_of(BERT, Axes(pipeline=4))) == whole
    first, last = stages_of(LLAMA, Axes(pipeline=2))
    assert first + last == 100 * 64 + LINEAR + NORMS + 100 * 64


def test_the_tensor_axis_splits_the_matrices_and_not_the_tables() -> None:
    (own,) = stages_of(LLAMA, Axes(tensor=2))
    assert own == 100 * 64 + LINEAR / 2 + NORMS


def test_shared_layers_run_as_often_as_there_are_layers() -> None:
    weights = ModelWeights(meta_model(ModelArguments(), ALBERT, "ForSequenceClassification"))
    assert weights.repeats == 4
    layer = 4 * 32 * 32 + 4 * 32 + 2 * 32 * 64 + 64 + 32 + 4 * 32
    outside = weights.counts.multiplied - layer
    assert weights.multiplied == outside + 4 * layer


def noted(kept: dict[int, torch.Tensor], each: torch.Tensor) -> torch.Tensor:
    kept[each.untyped_storage().data_ptr()] = each
    return each


def kept_by_autograd(
    config: PreTrainedConfig, dtype: torch.dtype, adapters: ModelArguments | None = None, **given: Any
) -> float:
    """Bytes that autograd keeps of a layer for each of 4 x 32 tokens: the difference of models of 1 and 3 layers."""
    totals = []
    for layers in (1, 3):
        torch.manual_seed(0)
        kind = AutoModelForCausalLM if isinstance(config, LlamaConfig) else AutoModelForSequenceClassification
        model: Any = kind.from_config(replace_layers(config, layers), dtype=dtype, **given)  # type: ignore[no-untyped-call]
        model = model if adapters is None else add_lora(model, adapters, TaskType.CAUSAL_LM)
        own = {each.untyped_storage().data_ptr() for each in model.parameters()}
        kept: dict[int, torch.Tensor] = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(noted, kept), lambda each: each)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=adapters is not None):
            model.base_model(input_ids=torch.randint(5, 50, (4, 32)))
        totals.append(sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in own))
    return (totals[1] - totals[0]) / 2 / (4 * 32)


MODERN: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 3,
    "sep_token_id": 4,
}
WIDE: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "share", "error"),
    [
        # The masks of two dropouts, 2 x hidden, are missing without dropout.
        (
            BertConfig(**WIDE, intermediate_size=256, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
            32 / 34,
            0.03,
        ),
        (LlamaConfig(**WIDE, intermediate_size=192, num_key_value_heads=2), 1, 0.03),
        (ModernBertConfig(**WIDE, **MODERN, intermediate_size=96), 1, 0.12),  # its norms keep less in 16 bits
    ],
    ids=["bert", "llama", "modernbert"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_what_autograd_keeps(
    config: PreTrainedConfig, share: float, error: float, dtype: torch.dtype
) -> None:
    types = types_of(planned(bf16=dtype == torch.bfloat16))
    estimated = layer_bytes(layer_widths(config), types, casts=False, length=32, has_matrix=False)
    measured = kept_by_autograd(config, dtype, attn_implementation="sdpa")
    assert share * estimated == pytest.approx(measured, rel=error)


def test_a_layer_with_adapters_keeps_their_inputs_and_not_its_own() -> None:
    """Without dropout, whose mask takes a byte on a GPU and four on a CPU."""
    args = unresolved(ModelArguments, {"method": "lora", "lora_r": 2, "dropout": 0.0})
    totals = []
    for layers in (1, 3):
        config = replace_layers(LLAMA, layers)
        plan = replace(planned(bf16=True), model=args, model_config=config)
        totals.append(estimate_memory(plan, meta_model(args, config, "ForCausalLM"), tokens=4 * 32).activations)
    measured = kept_by_autograd(LLAMA, torch.bfloat16, args, attn_implementation="sdpa")
    assert (totals[1] - totals[0]) / 2 / (4 * 32) == pytest.approx(measured, rel=0.05)


def test_dropped_inputs_of_adapters_have_masks() -> None:
    def of(dropout: float) -> int:
        plan = planned(bf16=True)
        args = unresolved(ModelArguments, {"method": "lora", "lora_dropout": dropout})
        return estimate_memory(
            replace(plan, model=args), meta_model(args, LLAMA, "ForCausalLM"), tokens=10
        ).activations

    assert of(0.1) - of(0.0) == 10 * (2 * (6 * 64 + 128) + 4 * 128)  # and what one adapter drops from, in fp32


@pytest.mark.parametrize(("bf16", "size"), [(True, 2), (False, 4)])
def test_logits_take_one_buffer_of_trl_however_small_the_vocabulary(bf16: bool, size: int) -> None:
    memory = estimate_memory(planned(bf16=bf16), meta_model(ModelArguments(), LLAMA, "ForCausalLM"), tokens=5000)
    assert memory.logits == 4096 * 32768 * size + 5000 * 64 * 4


def test_an_eager_attention_keeps_its_matrix_and_the_tensor_axis_splits_a_layer() -> None:
    widths, types = layer_widths(BertConfig()), types_of(planned(bf16=True))
    plain = layer_bytes(widths, types, False, 512, has_matrix=False)
    assert plain == 34 * 768  # Korthikanti et al. 2022, section 4.1
    assert layer_bytes(widths, types, False, 512, has_matrix=True) - plain == 5 * 12 * 512
    assert layer_bytes(widths, types, False, 512, has_matrix=False, parts=4) == (10 + 24 / 4) * 768  # section 4.2


LAYER = 20 * 64 + 4 * 64 + 8 * 128  # bytes of a token in 16 bits
IN_FP32 = 32 * 64 + 8 * 64 + 16 * 128
CASTS = 10 * 64


@pytest.mark.parametrize(
    ("bf16", "checkpointing", "expected"),
    [
        (True, False, 2 * 10 * (LAYER + CASTS)),
        (False, False, 2 * 10 * IN_FP32),
        (True, True, 10 * (LAYER + CASTS) + 2 * 10 * 64 * 4),
    ],
)
def test_activations_grow_with_tokens(bf16: bool, checkpointing: bool, expected: int) -> None:
    plan = planned(bf16=bf16, gradient_checkpointing=checkpointing)
    assert estimate_memory(plan, meta_model(plan.model, LLAMA, "ForCausalLM"), tokens=10).activations == expected


@pytest.mark.parametrize(
    ("schedule", "stage", "micro_batches", "count"),
    [("1f1b", 0, 8, 4), ("1f1b", 3, 8, 1), ("1f1b", 0, 2, 2), ("gpipe", 0, 8, 8), ("gpipe", 3, 8, 8)],
)
def test_a_stage_keeps_the_micro_batches_in_flight(schedule: str, stage: int, micro_batches: int, count: int) -> None:
    launch = Launch("pipeline", 4, 4, axes=Axes(pipeline=4))
    assert in_flight(planned(launch, pipeline_schedule=schedule), stage, micro_batches) == count


def working_of(strategy: str, axes: Axes, **given: Any) -> float:
    plan = planned(Launch(strategy, 8, 8, axes=axes), **given)
    weights = [Weight((100,)), Weight((10, 10), unit="0"), Weight((20, 10), unit="1")]
    return working_bytes(plan, weights, types_of(plan))


def test_fsdp2_gathers_two_layers_and_scatters_the_gradients_of_one() -> None:
    assert working_of("fsdp2", SHARDED, bf16=True) == 2 * (100 + 2 * 200) + 200 * (2 + 4)


@pytest.mark.parametrize(
    ("launch", "given", "of_gradient", "share"),
    [
        (Launch("fsdp2", 8, 8, axes=SHARDED), {"bf16": True}, 4, 1),
        (Launch("fsdp2", 8, 8, axes=SHARDED), {"bf16": True, "reduce_dtype": "bfloat16"}, 2, 1),
        (Launch("fsdp2", 8, 8, axes=SHARDED), {"bf16": True, "method": "lora"}, 2, 1),
        (Launch("fsdp2_offload", 8, 8, axes=SHARDED), {"bf16": True}, 4, 1),
        (Launch("ddp", 8, 8), {"bf16": True}, 4, 1),
        (Launch("zero2", 8, 8), {"bf16": True}, 2, 1 / 8),
    ],
)
def test_fsdp2_keeps_gradients_whole_between_micro_batches(
    launch: Launch, given: dict[str, Any], of_gradient: int, share: float
) -> None:
    plan = planned(launch, **given)
    weights = ModelWeights(meta_model(plan.model, LLAMA, "ForCausalLM"))
    memory = RankMemory(plan, weights)
    assert memory.at(10, 2).gradients == pytest.approx(weights.counts.trained * of_gradient * share, abs=4)
    assert memory.at(10, 2).working_copies == memory.at(10, 1).working_copies
    if launch.strategy == "fsdp2":
        assert memory.at(10, 1).gradients == pytest.approx(weights.counts.trained * 4 / 8, rel=0.02)


def test_autocast_keeps_copies_of_matrices() -> None:
    assert working_of("ddp", Axes(), bf16=True) == 300 * 2
    assert working_of("ddp", Axes(), bf16=False) == 0


def test_the_largest_term_is_named() -> None:
    memory = estimate_memory(planned(), meta_model(ModelArguments(), LLAMA, "ForCausalLM"), tokens=1)
    assert memory.largest == "optimizer states"
    assert memory.total_bytes == sum(vars(memory).values())


def test_only_a_gpu_has_a_framework_on_it() -> None:
    weights = ModelWeights(meta_model(ModelArguments(), LLAMA, "ForCausalLM"))
    assert RankMemory(planned(), weights).at(10, 1).framework == 0
    assert RankMemory(replace(planned(), gpus=1), weights).at(10, 1).framework > 0


def test_tokens_of_a_micro_batch() -> None:
    assert micro_batch_tokens(planned(per_device_train_batch_size=8, max_length=128), longest=40) == 320
    assert micro_batch_tokens(planned(per_device_train_batch_size=8, max_length=32), longest=40) == 256
    assert micro_batch_tokens(planned(max_tokens_per_device=500), longest=40) == 500
