"""A DeepSpeed file that contradicts the flags."""

from __future__ import annotations

from typing import Any

import pytest

from indictune.config.plan import Launch
from indictune.distributed.deepspeed_config import check_deepspeed_file, other_states, settings_of_steps
from indictune.errors import Problem
from tests.plans import plan_of

FLAGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "global_batch_size": 64,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.01,
    "bf16": True,
    "fp16": False,
}


def problems(config: dict[str, Any], accumulation: int | None = 4, **flags: Any) -> list[Problem]:
    return check_deepspeed_file(
        plan_of({**FLAGS, **flags}, launch=Launch("zero2", deepspeed=config), steps=accumulation)
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "optimizer": {"params": {"lr": "auto"}}},
        {
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 5e-5, "eps": 1e-8, "weight_decay": 0.01, "betas": [0.9, 0.999]},
            },
            "scheduler": {"params": {"warmup_max_lr": 5e-5}},
            "communication_data_type": "fp32",
            "zero_optimization": {"stage": 2, "compute_grad_norm": True},
        },
    ],
)
def test_nothing_auto_and_equal_values_agree(config: dict[str, Any]) -> None:
    assert problems(config) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu = 4, and --per_device_train_batch_size"
         " is 8"),
        ({"train_batch_size": 32}, "train_batch_size = 32, and --global_batch_size is 64"),
        ({"gradient_clipping": 0.5}, "gradient_clipping = 0.5, and --max_grad_norm is 1.0"),
        ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.params.lr = 0.1, and --learning_rate is 5e-05"),
        ({"optimizer": {"params": {"eps": 0.1}}}, "optimizer.params.eps = 0.1, and --adam_epsilon is 1e-08"),
        ({"optimizer": {"params": {"weight_decay": 0}}}, "optimizer.params.weight_decay = 0, and --weight_decay is"
         " 0.01"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "optimizer.params.betas = [0.9, 0.95], and --adam_beta1 "
         "--adam_beta2 is [0.9, 0.999]"),
        ({"scheduler": {"params": {"warmup_max_lr": 1}}}, "scheduler.params.warmup_max_lr = 1, and --learning_rate is"
         " 5e-05"),
        ({"bf16": {"enabled": False}}, "bf16.enabled = False, and --bf16 is True"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = True, and --fp16 is False"),
        ({"communication_data_type": "fp16"}, "communication_data_type = fp16, and --reduce_dtype is fp32"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "zero_optimization.compute_grad_norm = False"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps = 1, and the accumulation of "
         "--global_batch_size is 4"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_values(config: dict[str, Any], said: str) -> None:
    (found,) = problems(config)
    assert (found.code, found.flag) == ("deepspeed-file-contradicts", "--deepspeed")
    assert said in str(found)


def test_all_contradictions_come_at_once() -> None:
    config = {"train_batch_size": 32, "bf16": {"enabled": False}, "gradient_accumulation_steps": 2}
    found = problems(config)
    assert [each.details["key"] for each in found] == [
        "train_batch_size", "bf16.enabled", "gradient_accumulation_steps",
    ]  # fmt: skip


@pytest.mark.parametrize("scale", [0, 1024, None])
def test_a_fixed_loss_scale_is_refused(scale: int | None) -> None:
    config = {"fp16": {"enabled": "auto", "loss_scale": scale}}
    assert problems(config, fp16=False) == []
    assert [each.details["key"] for each in problems(config, fp16=True)] == ["fp16.loss_scale"] * bool(scale)


def test_settings_of_steps_are_those_that_no_flag_sets() -> None:
    params = {"warmup_num_steps": 5, "total_num_steps": "auto", "warmup_max_lr": 1e-4}
    config = {
        "scheduler": {"type": "WarmupDecayLR", "params": params},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": False, "torch_adam": True}},
        "gradient_predivide_factor": None,
        "train_batch_size": 8,
        "wandb": {"enabled": True},
    }
    assert settings_of_steps(config) == {
        "scheduler.type": "WarmupDecayLR",
        "scheduler.params.warmup_num_steps": 5,
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


def test_accumulation_is_compared_only_where_it_is_known() -> None:
    assert problems({"gradient_accumulation_steps": 1}, accumulation=None) == []


def test_a_key_of_another_shape_is_no_contradiction_of_ours() -> None:
    assert problems({"optimizer": None, "bf16": True}) == []
