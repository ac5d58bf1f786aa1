"""What a DeepSpeed file says that flags say too."""

from __future__ import annotations

from typing import Any

import pytest

from indictune.distributed.deepspeed_config import left_to_flags, other_states, settings_of_steps, unusable, values_in


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
    always = ["zero_optimization.compute_grad_norm", "scheduler.params.total_num_steps", "communication_data_type"]
    assert [key for key, _, _ in unusable(config, fp16=False)] == always
    assert {key for key, _, _ in unusable(config, fp16=True)} == {*always, "fp16.loss_scale"}
    usable = {"fp16": {"loss_scale": 0}, "communication_data_type": "fp32", "scheduler": {"type": "WarmupLR"}}
    assert unusable(usable, fp16=True) == []


def test_what_flags_say_is_left_to_them() -> None:
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_min_lr": 0}},
        "fp16": {"enabled": False, "loss_scale": 8},
        "zero_optimization": {"stage": 3, "compute_grad_norm": False},
    }
    assert left_to_flags(config) == {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": 0}},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "zero_optimization": {"stage": 3, "compute_grad_norm": True},
    }
    assert config["train_batch_size"] == 64
    assert left_to_flags({}) == {}


def test_settings_of_steps_are_those_that_no_flag_sets() -> None:
    params = {"warmup_min_lr": 1e-6, "warmup_num_steps": 5, "total_num_steps": "auto", "warmup_max_lr": 1e-4}
    config = {
        "scheduler": {"type": "WarmupDecayLR", "params": params},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "torch_adam": True}},
        "gradient_predivide_factor": None,
        "train_batch_size": 8,
        "wandb": {"enabled": True},
    }
    assert settings_of_steps(config) == {
        "scheduler.type": "WarmupDecayLR",
        "scheduler.params.warmup_min_lr": 1e-6,
        "optimizer.type": "Adam",
        "optimizer.params.adam_w_mode": False,
        "optimizer.params.torch_adam": True,
    }
    assert settings_of_steps({}) == {}


@pytest.mark.parametrize(
    ("before", "now", "others"),
    [
        ({"scheduler.type": "WarmupLR"}, {}, [("scheduler.type", "WarmupLR", "(none)")]),
        ({}, {"scheduler.type": "OneCycle"}, [("scheduler.type", "(none)", "OneCycle")]),
        ({"scheduler.type": "WarmupLR"}, {"scheduler.type": "StepLR"}, [("scheduler.type", "WarmupLR", "StepLR")]),
        ({"optimizer.type": "AdamW"}, {"optimizer.type": "AdamW", "scheduler.params.warmup_num_steps": 5}, []),
        ({"optimizer.type": "AdamW"}, {"optimizer.type": "Lion"}, [("optimizer.type", "AdamW", "Lion")]),
        ({"optimizer.type": "AdamW"}, {"optimizer.type": "adamw"}, []),
        ({"optimizer.type": "AdamW"}, {}, [("optimizer.type", "AdamW", "(none)")]),
        ({}, {}, []),
    ],
)
def test_a_schedule_or_an_optimizer_with_an_incompatible_state_is_named(
    before: dict[str, Any], now: dict[str, Any], others: list[tuple[str, str, str]]
) -> None:
    assert other_states(before, now) == others
