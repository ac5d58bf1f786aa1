"""Attention is checked against a model's shapes. test_causal and test_adapters check the names of modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from indictune.config.arguments import ModelArguments
from indictune.models.adapters import HEAD_NAMES
from indictune.models.task_models import check_shapes, load_classifier_config
from tests.refusals import refused


def check(folder: str, attention: str) -> None:
    args = ModelArguments(folder, attn_implementation=attention)
    check_shapes(AutoModelForSequenceClassification, args, load_classifier_config(args), HEAD_NAMES)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "paged|eager"])
def test_an_attention_of_transformers_is_accepted(saved: Callable[[str], str], attention: str) -> None:
    args = ModelArguments(saved("bert"), attn_implementation=attention)
    config = load_classifier_config(args)
    before = config.to_dict()
    check_shapes(AutoModelForSequenceClassification, args, config, HEAD_NAMES)
    assert config.to_dict() == before
    assert config._attn_implementation is None


def test_an_unknown_attention_is_refused_with_those_of_the_model(saved: Callable[[str], str]) -> None:
    folder = saved("bert")
    known = ('attn_implementation="eager"', "attn_implementation=sdpa")
    with refused("attention-not-available", "spda", folder, *known, flag="--attn_implementation"):
        check(folder, "spda")


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed")
def test_a_missing_package_is_refused(saved: Callable[[str], str]) -> None:
    with refused("attention-not-available", "FlashAttention2"):
        check(saved("bert"), "flash_attention_2")


def test_an_attention_that_the_model_does_not_support_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("mpnet").save_pretrained(tmp_path)
    with refused("attention-not-available", "MPNetForSequenceClassification does not support"):
        check(str(tmp_path), "sdpa")


def test_a_broken_configuration_is_not_blamed_on_the_attention(saved: Callable[[str], str]) -> None:
    path = Path(folder := saved("bert")) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 33}))
    with refused("model-unreadable", "The hidden size", flag="--model_name_or_path"):
        check(folder, "spda")
