"""What a DeepSpeed file says that flags say too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from indictune.distributed.zero import (
    settings_of_steps,
    unsupported_deepspeed_keys,
    unusable,
    values_in,
    values_left_to_flags,
)
from tests.ranks.launching import ROOT

GATHER = "stage3_gather_16bit_weights_on_model_save"
# Of accelerate's own template: transformers fills in its other values.
GATHER_AUTO: dict[str, Any] = json.loads((ROOT / "tests/inputs/deepspeed_gather_auto.json").read_text())

# What DeepSpeed has to be told even if the file says nothing: without a clipping it clips nothing.
LEFT = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, []),
        ({"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "optimizer": {"params": {"lr": "auto"}}}, []),
        ({"optimizer": None, "bf16": True}, []),
        ({"train_micro_batch_size_per_gpu": 4}, [{"per_device_train_batch_size": 4}]),
        ({"train_batch_size": 32}, [{"global_batch_size": 32}]),
        ({"gradient_clipping": 0.5}, [{"max_grad_norm": 0.5}]),
        ({"optimizer": {"params": {"lr": 0.1, "eps": 0.2}}}, [{"learning_rate": 0.1}, {"adam_epsilon": 0.2}]),
        ({"optimizer": {"params": {"betas": [0.8, 0.95]}}}, [{"adam_beta1": 0.8, "adam_beta2": 0.95}]),
        ({"scheduler": {"params": {"warmup_max_lr": 1, "warmup_num_steps": 9}}}, [{"learning_rate": 1},
         {"warmup_steps": 9}]),
        ({"bf16": {"enabled": False}}, [{"bf16": False}]),
        ({"bf16": {"enabled": True}}, [{"bf16": True, "fp16": False}]),
        ({"fp16": {"enabled": True}}, [{"fp16": True, "bf16": False}]),
        ({"communication_data_type": "bf16"}, [{"reduce_dtype": "bfloat16"}]),
        ({"communication_data_type": "fp16"}, []),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, [{"optim": "adamw_torch_fused"}]),
        ({"optimizer": {"type": "Lamb"}, "scheduler": {"type": "OneCycle"}}, []),
        ({"scheduler": {"type": "WarmupLR"}}, [{"lr_scheduler_type": "constant_with_warmup"}]),
        ({"scheduler": {"type": "WarmupDecayLR"}}, [{"lr_scheduler_type": "linear"}]),
        ({"scheduler": {"type": "WarmupCosineLR"}}, [{"lr_scheduler_type": "cosine"}]),
        ({"compile": {"disable": False, "backend": "eager"}},
         [{"torch_compile": True, "torch_compile_backend": "eager"}]),
        ({"compile": {"enabled": True}}, [{"torch_compile": True, "torch_compile_backend": "inductor"}]),
        ({"compile": {"disable": True, "backend": "inductor"}}, []),
        ({"compile": {"deepcompile": True}}, []),
    ],
)  # fmt: skip
def test_the_flags_that_say_the_same(config: dict[str, Any], fields: list[dict[str, Any]]) -> None:
    assert [each.fields for each in values_in(config)] == fields


def test_values_that_no_run_can_use_are_named() -> None:
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 1024},
        "zero_optimization": {"stage": 2, "compute_grad_norm": False},
        "scheduler": {"params": {"total_num_steps": 100}},
        "communication_data_type": "fp16",
    }
    always = ["zero_optimization.compute_grad_norm", "communication_data_type", "scheduler.params.total_num_steps"]
    assert [key for key, _, _ in unusable(config, fp16=False)] == always
    assert {key for key, _, _ in unusable(config, fp16=True)} == {*always, "fp16.loss_scale"}
    usable = {"fp16": {"loss_scale": 0}, "communication_data_type": "fp32", "scheduler": {"type": "WarmupLR"}}
    assert unusable(usable, fp16=True) == []


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            {"optimizer": {"type": "Lamb", "params": {"max_coeff": 0.3}}},
            ["optimizer.type", "optimizer.params.max_coeff"],
        ),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, ["optimizer.params.adam_w_mode"]),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": True, "lr": 0.1, "betas": [0.9, 0.99]}}}, []),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto"}}}, ["scheduler.type"]),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0}}}, []),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6}}}, ["scheduler.params.warmup_min_lr"]),
    ],
)
def test_what_no_flag_gives_of_an_optimizer_and_a_schedule_is_named(config: dict[str, Any], keys: list[str]) -> None:
    assert [key for key, _, _ in unusable(config, fp16=False)] == keys


def test_what_flags_say_is_left_to_them() -> None:
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_min_lr": 0}},
        "compile": {"disable": False, "backend": "inductor", "debug_log": True},
        "fp16": {"enabled": False, "loss_scale": 8},
        "zero_optimization": {"stage": 2, "compute_grad_norm": False},
    }
    assert values_left_to_flags(config) == {
        **LEFT,
        "compile": {"debug_log": True},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "zero_optimization": {"stage": 2, "compute_grad_norm": True},
    }
    assert config["train_batch_size"] == 64
    assert values_left_to_flags({}) == LEFT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, []),
        ({"stage3_gather_16bit_weights_on_model_save": True}, []),
        ({"stage3_gather_16bit_weights_on_model_save": False}, ["stage3_gather_16bit_weights_on_model_save"]),
        ({"stage3_gather_16bit_weights_on_model_save": "auto"}, []),
        ({"gather_16bit_weights_on_model_save": "auto"}, []),
        ({"gather_16bit_weights_on_model_save": False}, ["gather_16bit_weights_on_model_save"]),
        ({"stage3_gather_fp16_weights_on_model_save": False}, ["stage3_gather_fp16_weights_on_model_save"]),
    ],
)
def test_stage_3_saves_the_whole_model(settings: dict[str, Any], named: list[str]) -> None:
    config = {"zero_optimization": {"stage": 3, **settings}}
    assert [key for key, _, _ in unusable(config, fp16=False)] == [f"zero_optimization.{name}" for name in named]
    whole = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    assert values_left_to_flags(config)["zero_optimization"] == whole


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 4}, ["sequence_parallel_size: 4"]),
        ({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
         ["tensor_parallel.autotp_size: 2"]),
        ({"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1}, []),
        ({"tensor_parallel": {"autotp_size": 0}}, []),
        ({"tensor_parallel": None}, []),
        ({"zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"}}, []),
        ({"optimizer": {"params": {"lr": "auto", "torch_adam": "auto"}}, "bf16": {"enabled": "auto"}}, []),
        ({"zero_optimization": {"sub_group_size": "auto"}}, ["zero_optimization.sub_group_size: auto"]),
        (GATHER_AUTO, []),
        (GATHER_AUTO | {"zero_optimization": {"stage": 2, GATHER: "auto"}}, [f"zero_optimization.{GATHER}: auto"]),
    ],
)  # fmt: skip
def test_what_splits_a_row_or_has_no_value_is_refused(config: dict[str, Any], keys: list[str]) -> None:
    assert unsupported_deepspeed_keys(config) == keys


def test_settings_of_steps_are_those_that_no_flag_sets() -> None:
    config = {
        "scheduler": {"type": "WarmupDecayLR"},
        "prescale_gradients": True,
        "gradient_predivide_factor": None,
        "train_batch_size": 8,
    }
    assert settings_of_steps(config) == {"prescale_gradients": True}
    assert settings_of_steps({}) == {}


def test_a_model_whose_matrices_are_split_is_saved_whole() -> None:
    config = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    whole = {"stage": 1, "stage3_gather_16bit_weights_on_model_save": True}
    assert values_left_to_flags(config)["zero_optimization"] == whole


def test_the_plan_of_the_models_type_replaces_that_of_the_file() -> None:
    block = {
        "autotp_size": 2,
        "vocab_parallel_lm_head": True,
        "preset_model": "llama",
        "partition_config": {"layer": 1},
    }
    config = {"tensor_parallel": block, "zero_optimization": {"stage": 1}}
    assert values_left_to_flags(config)["tensor_parallel"] == {"autotp_size": 2}
    names = ("partition_config", "preset_model", "vocab_parallel_lm_head")
    assert [key for key, _, _ in unusable(config, fp16=False)] == [f"tensor_parallel.{name}" for name in names]
