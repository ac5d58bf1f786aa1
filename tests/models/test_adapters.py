"""LoRA and QLoRA: what is trained, what is saved, and that what is read again is what was trained."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    pipeline,
)

from indictune.config.arguments import Method, ModelArguments
from indictune.models.adapters import HEAD_NAMES, save_adapter_extras
from indictune.models.load import load_tokenizer, load_trained
from indictune.models.task_models import check_shapes, load_classifier, load_classifier_config
from tests.models.tiny import CONFIGS, words_tokenizer
from tests.refusals import refused

LABELS = ["negative", "neutral", "positive"]
IDS = torch.tensor([[3, 4, 9, 10], [5, 6, 9, 10], [7, 8, 9, 10]])

HEADS = {
    "bert": {"classifier.weight", "classifier.bias"},
    "albert": {"classifier.weight", "classifier.bias"},
    "roberta": {f"classifier.{layer}.{kind}" for layer in ("dense", "out_proj") for kind in ("weight", "bias")},
    "xlm-roberta": {f"classifier.{layer}.{kind}" for layer in ("dense", "out_proj") for kind in ("weight", "bias")},
    "modernbert": {"classifier.weight", "classifier.bias", "head.dense.weight", "head.norm.weight"},
    "llama": {"score.weight"},
}

Saved = Callable[[str], str]


def masked_lm(folder: Path, architecture: str = "bert") -> str:
    """A checkpoint of masked language modelling: BERT's has no pooler."""
    model: Any = AutoModelForMaskedLM.from_config(CONFIGS[architecture]())  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return str(folder)


def load(args: ModelArguments) -> Any:
    torch.manual_seed(0)
    model = load_classifier(args, LABELS, load_tokenizer(args))
    assert isinstance(model, PeftModel)
    return model


def train(model: nn.Module, steps: int = 8, learning_rate: float = 1e-2) -> list[float]:
    """The losses of some steps on three texts of the three labels."""
    model.train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(input_ids=IDS).logits.float(), torch.arange(3))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def save(model: Any, args: ModelArguments, folder: Path) -> Path:
    model.save_pretrained(str(folder))
    save_adapter_extras(model, folder)
    load_tokenizer(args).save_pretrained(folder)
    return folder


def bits(model: nn.Module, trained: bool = False) -> dict[str, torch.Tensor]:
    """A copy of the frozen weights (or the trained ones) as bytes: 4-bit weights stored as bf16 may spell a NaN."""
    weights = {name: weights for name, weights in model.named_parameters() if weights.requires_grad == trained}
    return {name: tensor.detach().contiguous().view(torch.uint8).clone() for name, tensor in weights.items()}


def all_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_lora_matrices_and_the_plain_head_are_trained(saved: Saved, architecture: str, method: Method) -> None:
    model = load(ModelArguments(saved(architecture), method=method))
    prefix, copy = "base_model.model.", ".modules_to_save.default"
    trained = {name.removeprefix(prefix) for name, weights in model.named_parameters() if weights.requires_grad}
    lora = {name for name in trained if "lora_" in name}
    assert lora
    assert {name.replace(copy, "") for name in trained - lora} == HEADS[architecture]
    assert not any(name.startswith(("classifier", "score")) for name in lora)
    assert {weights.dtype for weights in model.parameters() if weights.requires_grad} == {torch.float32}


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.more), "qlora"])
def test_what_is_read_again_is_what_was_trained(
    saved: Saved, tmp_path: Path, architecture: str, method: Method
) -> None:
    args = ModelArguments(saved(architecture), method=method)
    model = load(args)
    train(model, steps=3)
    folder = save(model, args, tmp_path / "out")
    torch.manual_seed(99)
    again = load_trained(folder)
    assert not again.training
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(("architecture", "pooler"), [("bert", "bert.pooler.dense"), ("albert", "albert.pooler")])
def test_a_pooler_that_the_checkpoint_lacks_is_trained_and_saved(
    tmp_path: Path, method: Method, architecture: str, pooler: str
) -> None:
    args = ModelArguments(masked_lm(tmp_path / "mlm", architecture), method=method)
    model = load(args)
    train(model, steps=3)
    folder = save(model, args, tmp_path / "out")
    assert f"base_model.model.{pooler}.weight" in load_file(folder / "adapter_model.safetensors")
    torch.manual_seed(99)
    assert torch.equal(load_trained(folder)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_without_that_another_pooler_is_drawn_on_reading(tmp_path: Path) -> None:
    """The trap itself, with peft alone."""
    base = masked_lm(tmp_path / "mlm")
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=3),
        LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"),
    ).eval()
    model.save_pretrained(str(tmp_path / "out"))
    torch.manual_seed(99)
    again = PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=3), tmp_path / "out"
    )
    assert not torch.allclose(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_folder_knows_its_labels_and_a_pipeline_tells_them(
    saved: Saved, tmp_path: Path, method: Method
) -> None:
    args = ModelArguments(saved("llama"), method=method)
    folder = save(load(args), args, tmp_path / "out")
    config = AutoConfig.from_pretrained(folder)
    assert config.id2label == {0: "negative", 1: "neutral", 2: "positive"}
    assert config.label2id == {"negative": 0, "neutral": 1, "positive": 2}
    assert config.architectures == ["LlamaForSequenceClassification"]
    assert not (folder / "model.safetensors").exists()
    model: Any = load_trained(folder)
    tokenizer: Any = load_tokenizer(ModelArguments(str(folder)))
    answers: Any = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)(["మంచి ok", "ok"])
    assert [{answer["label"] for answer in row} for row in answers] == [set(LABELS), set(LABELS)]


def test_transformers_alone_does_not_read_an_adapter_with_a_new_head(saved: Saved, tmp_path: Path) -> None:
    """Once this fails, `pipeline(folder)` may do without `load_trained` (transformers 5.23)."""
    args = ModelArguments(saved("bert"), method="lora")
    folder = save(load(args), args, tmp_path / "out")
    with pytest.raises(ValueError, match="Could not load model"):
        pipeline("text-classification", str(folder))


def test_a_full_model_needs_no_extras(saved: Saved, tmp_path: Path) -> None:
    args = ModelArguments(saved("bert"))
    save_adapter_extras(load_classifier(args, LABELS, load_tokenizer(args)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_flags_reach_the_adapter(saved: Saved, tmp_path: Path) -> None:
    args = ModelArguments(
        saved("llama"),
        method="lora",
        lora_r=3,
        lora_alpha=5,
        lora_dropout=0.25,
        lora_target_modules=["q_proj", "layers.1.self_attn.v_proj"],
        model_revision="v1",
    )
    model = load(args)
    wrapped = {name for name, module in model.named_modules() if name.endswith("lora_A.default")}
    layers = "base_model.model.model.layers"
    assert wrapped == {
        f"{layers}.{layer}.lora_A.default"
        for layer in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.self_attn.v_proj")
    }
    assert model.get_submodule(f"{layers}.0.self_attn.q_proj.lora_A.default").weight.shape == (3, 64)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}
    written = json.loads((save(model, args, tmp_path / "out") / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (3, 5, 0.25)
    assert (written["base_model_name_or_path"], written["revision"]) == (args.model_name_or_path, "v1")
    assert written["task_type"] == "SEQ_CLS"


@pytest.mark.parametrize("targets", [["q_proj", "qproj"], ["score"], ["proj"], ["all-linear", "qproj"]])
def test_a_target_without_a_match_is_refused_with_the_known_names(saved: Saved, targets: list[str]) -> None:
    args = ModelArguments(saved("llama"), method="lora", lora_target_modules=targets)
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with refused("no-such-module", targets[-1], known, flag="--lora_target_modules"):
        check_shapes(AutoModelForSequenceClassification, args, load_classifier_config(args), HEAD_NAMES)


def test_qlora_trains_on_a_frozen_base_in_nf4(saved: Saved) -> None:
    args = ModelArguments(saved("llama"), method="qlora", dropout=0.0)
    model = load(args)
    quantised = {name: module for name, module in model.named_modules() if name.endswith(".base_layer")}
    layers = CONFIGS["llama"]().num_hidden_layers
    assert len(quantised) == 7 * layers
    for module in quantised.values():
        assert type(module).__module__.startswith("bitsandbytes")
        state = module.weight.quant_state
        assert (state.quant_type, state.nested, module.compute_dtype) == ("nf4", True, torch.bfloat16)
        assert module.weight.dtype == torch.bfloat16
    frozen = bits(model)
    losses = train(model, steps=12)
    assert losses[-1] < losses[0] / 2
    assert len(frozen) > 7 * layers
    assert all_equal(frozen, bits(model))


def test_evaluating_leaves_the_base_as_it_was(saved: Saved) -> None:
    """Also on a CPU that bitsandbytes would pack the weights for."""
    model = load(ModelArguments(saved("llama"), method="qlora"))
    before = bits(model)
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
        layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer")
        assert layer.weight.quant_state.nested
        assert all_equal(before, bits(model))
        assert torch.equal(logits, model(input_ids=IDS).logits)


def test_lora_leaves_the_base_as_it_was(saved: Saved) -> None:
    model = load(ModelArguments(saved("bert"), method="lora", dropout=0.0))
    frozen, trained = bits(model), bits(model, trained=True)
    losses = train(model)
    assert losses[-1] < losses[0]
    assert all_equal(frozen, bits(model))
    assert not all_equal(trained, bits(model, trained=True))


@pytest.mark.more
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_the_trained_head_itself_is_saved(saved: Saved, tmp_path: Path, architecture: str) -> None:
    args = ModelArguments(saved(architecture), method="lora")
    model = load(args)
    name = "score" if architecture == "llama" else "classifier"
    before = model.get_submodule(f"base_model.model.{name}.modules_to_save.default").weight.clone()
    train(model, steps=2)
    after = model.get_submodule(f"base_model.model.{name}.modules_to_save.default").weight
    assert not torch.equal(before, after)
    folder = save(model, args, tmp_path / "out")
    assert torch.equal(load_file(folder / "adapter_model.safetensors")[f"base_model.model.{name}.weight"], after)


def test_an_adapter_is_no_model_to_start_from(saved: Saved, tmp_path: Path) -> None:
    args = ModelArguments(saved("bert"), method="lora")
    folder = save(load(args), args, tmp_path / "out")
    with refused("adapter-as-model", str(folder)):
        load_classifier_config(ModelArguments(str(folder)))


def test_an_adapter_whose_base_is_gone_says_so(saved: Saved, tmp_path: Path) -> None:
    args = ModelArguments(saved("bert"), method="lora")
    folder = save(load(args), args, tmp_path / "out")
    os.rename(args.model_name_or_path, tmp_path / "elsewhere")
    with refused("no-such-model-folder", args.model_name_or_path, flag=f"--model {folder}: its base"):
        load_trained(folder)


# peft 0.21. Whoever adds one looks at what peft reads or imports by it when an adapter is loaded, and lets
# `check_adapter` refuse it if need be.
FIELDS_LOOKED_AT = """
    alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias corda_config
    ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights kasa_config
    layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias lora_dropout
    lora_ga_config megatron_config megatron_core modules_to_save monteclora_config peft_type peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules target_parameters task_type
    trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config
"""


def test_the_fields_of_a_lora_configuration_are_those_that_were_looked_at() -> None:
    assert sorted(field.name for field in fields(LoraConfig)) == FIELDS_LOOKED_AT.split()


def test_peft_unpickles_and_imports_by_a_lora_configuration_where_it_was_looked_at() -> None:
    """`corda.py` and `loraga.py` do so in what prepares a new adapter alone, `tp_layer.py` for `megatron_config`."""
    folder = Path(inspect.getfile(LoraConfig)).parent
    lines = [(path.name, line) for path in folder.rglob("*.py") for line in path.read_text().splitlines()]
    found = Counter(
        name for name, line in lines if re.search(r"torch\.load\(|import_module\(|pickle|__import__", line)
    )
    assert found == {"corda.py": 2, "loraga.py": 1, "tp_layer.py": 1}
