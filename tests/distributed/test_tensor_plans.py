"""Which models tensor parallelism splits, and into how many parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import (
    AlbertConfig,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    MixtralConfig,
    ModernBertConfig,
    Phi3Config,
    PreTrainedConfig,
    XLMRobertaConfig,
)

from indictune.config.plan import Axes, Launch
from indictune.distributed.tensor import check_split
from indictune.errors import Problem
from indictune.preflight.checks import preflight_of_evaluation
from indictune.tasks.classification import Classification
from tests.plans import codes, plan_of


def found_in(config: PreTrainedConfig, size: int, **model: Any) -> list[Problem]:
    """The problems of a model that is split into `size` parts."""
    launch = Launch("tp", size, size, axes=Axes(tensor=size))
    return check_split(replace(plan_of(model=model, launch=launch), model_config=config))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (BertConfig(), 4),
        (XLMRobertaConfig(), 12),
        (AlbertConfig(num_attention_heads=12, intermediate_size=3072), 2),
        (ModernBertConfig(), 12),
        (LlamaConfig(), 8),
        (LlamaConfig(num_key_value_heads=8), 8),
    ],
)
def test_sizes_that_divide_are_split(config: PreTrainedConfig, size: int) -> None:
    assert found_in(config, size) == []


@pytest.mark.parametrize(
    ("config", "size", "sizes", "possible"),
    [
        (BertConfig(), 8, "num_attention_heads 12, intermediate_size 3072", "1, 2, 3, 4, 6, 12"),
        (LlamaConfig(num_key_value_heads=2), 4, "num_key_value_heads 2", "1, 2"),
        (LlamaConfig(vocab_size=32001), 3, "vocab_size 32001", "1"),
        (BertConfig(vocab_size=30523, num_attention_heads=8), 3, "num_attention_heads 8", "1, 2, 4, 8"),
    ],
)
def test_others_are_refused_with_the_sizes_that_divide(
    config: PreTrainedConfig, size: int, sizes: str, possible: str
) -> None:
    (found,) = found_in(config, size)
    assert (found.code, found.flag) == ("tensor-does-not-divide", "--model_name_or_path")
    assert sizes in str(found)
    assert f" {possible}." in str(found)


def test_so_does_an_evaluation() -> None:
    launch = Launch("tp", 5, 5, axes=Axes(tensor=5))
    plan = replace(plan_of(launch=launch), model_config=BertConfig())
    found = codes(preflight_of_evaluation(plan, Classification()))
    assert found == [("tensor-does-not-divide", "--model_name_or_path")]


@pytest.mark.parametrize(
    ("config", "reason"), [(DistilBertConfig(), "distilbert"), (MixtralConfig(), "moe_tp_experts")]
)
def test_a_model_without_a_known_plan_is_refused_with_the_reason(config: PreTrainedConfig, reason: str) -> None:
    (found,) = found_in(config, 2)
    assert (found.code, found.flag) == ("no-tensor-plan", "--model_name_or_path")
    assert reason in str(found)


@pytest.mark.parametrize(
    ("config", "method", "found"),
    [
        (BertConfig(), "full", []),
        (ModernBertConfig(), "full", []),
        (LlamaConfig(vocab_size=32001), "full", []),  # each rank has the output layer
        (LlamaConfig(), "lora", [("not-under-tensor", "--method")]),
        (Phi3Config(), "full", [("no-tensor-plan", "--model_name_or_path")]),
        (
            BertConfig(num_attention_heads=3, hidden_size=96),
            "full",
            [("tensor-does-not-divide", "--model_name_or_path")],
        ),
    ],
)
def test_what_deepspeed_cannot_split_is_refused(
    config: PreTrainedConfig, method: str, found: list[tuple[str, str]]
) -> None:
    launch = Launch("zero1_tp", 2, 2, deepspeed={"zero_optimization": {"stage": 1}}, axes=Axes(tensor=2))
    plan = plan_of(model={"method": method}, launch=launch)
    assert codes(check_split(replace(plan, model_config=config))) == found


@pytest.mark.parametrize(
    ("model", "flag"),
    [
        ({"method": "qlora"}, "--method"),
        ({"method": "lora", "use_dora": True}, "--use_dora"),
        ({"method": "lora", "modules_to_save": ["lm_head"]}, "--modules_to_save"),
    ],
)
def test_a_method_that_cannot_be_split_is_refused(model: dict[str, Any], flag: str) -> None:
    assert codes(found_in(LlamaConfig(), 2, **model)) == [("not-under-tensor", flag)]
    assert found_in(LlamaConfig(), 1, **model) == []


def test_ranks_of_a_matrix_would_not_agree_on_a_scale_of_the_loss() -> None:
    launch = Launch("tp", 2, 2, axes=Axes(tensor=2))
    plan = replace(plan_of({"fp16": True}, launch=launch), model_config=BertConfig())
    assert codes(check_split(plan)) == [("fp16-under-tensor", "--fp16")]
    assert check_split(replace(plan, launch=Launch("ddp", 2, 2))) == []
