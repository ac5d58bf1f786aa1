"""The layers that FSDP gathers one at a time, of every architecture."""

from __future__ import annotations

import os

import pytest
from accelerate.state import DistributedType
from accelerate.utils import TorchDynamoPlugin
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from indictune.distributed.fsdp import repeated_blocks
from indictune.distributed.sharding import fit_to_model, whole_models
from tests.models.tiny import CONFIGS

BLOCKS = {
    "bert": "BertLayer",
    "albert": "AlbertLayerGroup",
    "xlm-roberta": "XLMRobertaLayer",
    "modernbert": "ModernBertEncoderLayer",
    "llama": "LlamaDecoderLayer",
}


def classifier(architecture: str) -> nn.Module:
    model = AutoModelForSequenceClassification.from_config(CONFIGS[architecture]())  # type: ignore[no-untyped-call]
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize(("architecture", "block"), BLOCKS.items())
def test_the_repeated_blocks_of_a_model_are_its_layers(architecture: str, block: str) -> None:
    assert repeated_blocks(classifier(architecture)) == [block]


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_lora_does_not_change_them(architecture: str) -> None:
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules="all-linear")
    model = get_peft_model(classifier(architecture), lora)
    assert repeated_blocks(model) == [BLOCKS[architecture]]


def test_lists_inside_a_layer_are_part_of_the_layer() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)])

    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    assert repeated_blocks(model) == ["Layer"]


def test_two_stacks_give_the_classes_of_both() -> None:
    model = nn.Module()
    model.encoder = nn.ModuleList([nn.Linear(2, 2)])
    model.decoder = nn.ModuleList([nn.Bilinear(2, 2, 2), nn.Linear(2, 2)])
    assert repeated_blocks(model) == ["Bilinear", "Linear"]


def test_a_model_without_layers_is_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([])
    with pytest.raises(ValueError, match="Module has no list of repeated layers"):
        repeated_blocks(model)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> TrainingArguments:
    """Of one of several processes, by their state."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"):
        monkeypatch.setenv(name, "false")  # restored afterwards
    made = TrainingArguments(output_dir="unused", use_cpu=True)
    monkeypatch.setattr(made.distributed_state, "distributed_type", DistributedType.MULTI_GPU)
    return made


def test_accelerate_gets_the_layers(monkeypatch: pytest.MonkeyPatch, args: TrainingArguments) -> None:
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "SomethingElse")
    fit_to_model(classifier("bert"), args)
    assert os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "BertLayer"


def test_an_unsharded_model_is_compiled_as_a_whole(args: TrainingArguments) -> None:
    fit_to_model(classifier("bert"), args)
    assert not TorchDynamoPlugin(backend="inductor").use_regional_compilation


@pytest.mark.parametrize("by_flag", [True, False], ids=["--fsdp", "accelerate's config"])
def test_a_sharded_model_is_compiled_by_blocks(args: TrainingArguments, by_flag: bool) -> None:
    if by_flag:
        args.fsdp_plugin_args = {"fsdp_version": 2}
    else:
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    fit_to_model(classifier("bert"), args)
    assert TorchDynamoPlugin(backend="inductor").use_regional_compilation


def test_a_model_is_built_whole_where_zero3_came_up() -> None:
    """A machine that is examined in the run counts the parameters of the model."""
    with whole_models():
        assert not is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # type: ignore[no-untyped-call]
    with whole_models():
        assert not is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    assert is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    del config
