"""`--dropout` reaches every dropout of every architecture: modules, attention functions and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig

from indictune.config.arguments import Method, ModelArguments
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_classifier, set_config_dropout, set_module_dropout
from tests.models.tiny import CONFIGS

FIELDS = {
    "bert": {"hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"},
    "albert": {"hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"},
    "roberta": {"hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"},
    "xlm-roberta": {"hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"},
    "modernbert": {"attention_dropout", "embedding_dropout", "mlp_dropout", "classifier_dropout"},
    "llama": {"attention_dropout"},
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_exactly_the_dropout_fields_change(architecture: str) -> None:
    config = CONFIGS[architecture]()
    before = config.to_dict()
    set_config_dropout(config, 0.375)
    changed = {field: value for field, value in config.to_dict().items() if before[field] != value}
    assert changed == dict.fromkeys(FIELDS[architecture], 0.375)


def test_fields_that_are_no_probability_stay() -> None:
    fields: dict[str, Any] = {"use_dropout": True, "dropout_type": "alpha", "drop_every": 12}
    config = BertConfig(**fields)
    set_config_dropout(config, 0.375)
    assert fields.items() <= config.to_dict().items()


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_module_has_it(saved: Callable[[str], str], architecture: str, method: Method) -> None:
    args = ModelArguments(saved(architecture), method=method, dropout=0.375)
    model = load_classifier(args, ["no", "yes"], load_tokenizer(args))
    probabilities = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    if (architecture, method) != ("llama", "full"):
        assert probabilities
    assert set(probabilities) <= {0.375}
    if isinstance(model, PeftModel):
        assert model.peft_config["default"].to_dict()["lora_dropout"] == 0.375


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.more)])
def test_at_0_two_passes_in_training_are_equal(saved: Callable[[str], str], architecture: str, method: Method) -> None:
    ids = torch.arange(3, 11).repeat(2, 1)

    def logits_of_two_passes(dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
        args = ModelArguments(saved(architecture), method=method, dropout=dropout)
        model = load_classifier(args, ["no", "yes"], load_tokenizer(args)).train()
        return model(input_ids=ids).logits, model(input_ids=ids).logits

    assert torch.equal(*logits_of_two_passes(0.0))
    assert not torch.equal(*logits_of_two_passes(0.5))


def test_modules_made_outside_the_configuration_follow() -> None:
    model = AutoModelForSequenceClassification.from_config(CONFIGS["bert"]())  # type: ignore[no-untyped-call]
    model.add_module("extra", nn.Sequential(nn.Dropout(0.9)))
    set_module_dropout(model, 0.25)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}


def test_loading_does_not_rely_on_the_configuration_alone(
    saved: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indictune.models.task_models.set_config_dropout", lambda *_: None)
    args = ModelArguments(saved("bert"), dropout=0.375)
    model = load_classifier(args, ["no", "yes"], load_tokenizer(args))
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.375}


def test_without_the_flag_the_model_keeps_its_own(saved: Callable[[str], str]) -> None:
    args = ModelArguments(saved("bert"))
    model = load_classifier(args, ["no", "yes"], load_tokenizer(args))
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.1}
