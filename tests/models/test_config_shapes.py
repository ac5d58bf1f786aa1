"""Attention is checked against a model's shapes. test_causal and test_adapters check the names of modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoConfig

from indictune.config.arguments import ModelArguments
from indictune.models.classifier import check_classifier, load_classifier_config
from tests.refusals import refused


def check(folder: str, attention: str) -> None:
    args = ModelArguments(folder, attn_implementation=attention)
    check_classifier(args, load_classifier_config(args))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "paged|eager"])
def test_an_attention_of_transformers_is_accepted(saved: Callable[[str], str], attention: str) -> None:
    args = ModelArguments(saved("bert"), attn_implementation=attention)
    config = load_classifier_config(args)
    before = config.to_dict()
    check_classifier(args, config)
    assert config.to_dict() == before
    assert config._attn_implementation is None


def test_an_unknown_attention_is_refused_with_those_of_the_model(saved: Callable[[str], str]) -> None:
    folder = saved("bert")
    known = ('attn_implementation="eager"', "attn_implementation=sdpa")
    with refused("attention-not-available", "spda", folder, *known, flag="--attn_implementation"):
        check(folder, "spda")


@pytest.mark.parametrize(
    ("attention", "module", "named"),
    [
        ("flash_attention_2", "flash_attn", "The package is flash-attn."),
        ("flash_attention_3", "flash_attn_interface", "The package is flash-attn-3."),
        ("kernels-community/flash-attn", "kernels", "e.g. `pip install kernels=="),
    ],
)
def test_a_missing_package_is_named(saved: Callable[[str], str], attention: str, module: str, named: str) -> None:
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    with refused("attention-not-available", named):
        check(saved("bert"), attention)


def test_an_attention_that_the_model_does_not_support_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("mpnet").save_pretrained(tmp_path)
    with refused("attention-not-available", "MPNetForSequenceClassification does not support"):
        check(str(tmp_path), "sdpa")


def test_a_broken_configuration_is_not_blamed_on_the_attention(saved: Callable[[str], str]) -> None:
    path = Path(folder := saved("bert")) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 33}))
    with refused("model-unreadable", "The hidden size", flag="--model_name_or_path"):
        check(folder, "spda")
