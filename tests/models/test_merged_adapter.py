"""A merged model computes what its adapter computed on its base, whatever the adapter is made of."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.modules import Linear4bit
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    pipeline,
)

from indictune.cli import main
from indictune.commands.merge import MergeFlags, merge_adapter
from indictune.config.arguments import Method, ModelArguments
from indictune.errors import UserError
from indictune.models.adapters import nf4_config, record_base, save_adapter_extras
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_causal, load_classifier
from tests.models.tiny import SMALL, words_tokenizer
from tests.ranks.launching import python, start
from tests.refusals import refused

IDS = torch.tensor([[3, 4, 5, 9, 10, 7], [5, 6, 9, 10, 8, 4]])
LINEAR = ["q_proj", "v_proj", "down_proj"]
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def llama(folder: Path, tied: bool = False, dtype: torch.dtype = torch.float32, seed: int = 1) -> Path:
    """A LLaMA with random weights that are large enough for every part to count."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SMALL,
        intermediate_size=128,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(dtype).save_pretrained(folder)
    tokenizer = words_tokenizer(None)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    """A BERT without a head: its weights' names lack the prefix that a classifier's have."""
    torch.manual_seed(1)
    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=64, initializer_range=0.2)
    model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    model.bert.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return folder


def randomise(model: Any) -> None:
    """As if it had been trained: every trainable weight moves, LoRA's zeros too."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def adapt(base: Any, folder: Path, **settings: Any) -> Any:
    """An adapter with random weights on a loaded base, saved as a run saves it."""
    defaults: dict[str, Any] = {"task_type": TaskType.CAUSAL_LM, "r": 4, "lora_alpha": 12, "target_modules": LINEAR}
    model = get_peft_model(base, LoraConfig(**(defaults | settings))).eval()
    randomise(model)
    model.save_pretrained(str(folder))
    save_adapter_extras(model, folder)
    return model


def causal(base: Path, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, **({"dtype": torch.float32} | settings))


def classifier(base: Path, **settings: Any) -> Any:
    names = {"id2label": LABELS, "label2id": {label: index for index, label in LABELS.items()}}
    return AutoModelForSequenceClassification.from_pretrained(base, **({"dtype": torch.float32} | names | settings))


def run(adapter: Path, out: Path, **flags: Any) -> str:
    return merge_adapter(MergeFlags(model=str(adapter), output_dir=str(out), **flags))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """In double precision, where its weights are fp32: some processors round by more than is compared."""
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        model = copy.deepcopy(model).double()
    found: torch.Tensor = model.eval()(input_ids=IDS).logits.float()
    return found


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3}},
    "head": {"modules_to_save": ["lm_head"]},
    "head and embedding": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "matrices on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "matrices on the embedding, dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "matrices on the head": {"target_modules": ["q_proj", "lm_head"]},
}
QUICK_KINDS = ("dora", "head and embedding")


@pytest.mark.parametrize(
    "kind",
    [*QUICK_KINDS, *(pytest.param(each, marks=pytest.mark.slow) for each in KINDS if each not in QUICK_KINDS)],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_merged_language_model_is_the_adapted_one(tmp_path: Path, kind: str, tied: bool) -> None:
    base = llama(tmp_path / "base", tied)
    adapted = adapt(causal(base), tmp_path / "adapter", **KINDS[kind])
    run(tmp_path / "adapter", tmp_path / "out")
    merged = causal(tmp_path / "out")
    assert largest_difference(logits(causal(base)), logits(adapted)) > 0.1
    assert largest_difference(logits(merged), logits(adapted)) < 1e-5
    changes_a_tied_weight = tied and ("head" in kind or "embedding" in kind)
    assert merged.config.tie_word_embeddings == (tied and not changes_a_tied_weight)
    if not changes_a_tied_weight:  # peft itself merges into both of two tied weights what was trained for one
        assert largest_difference(logits(merged), logits(adapted.merge_and_unload())) < 1e-5


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("make", [bert, llama], ids=["bert", "llama"])
def test_a_merged_classifier_is_the_adapted_one_and_tells_its_labels(
    tmp_path: Path, make: Callable[[Path], Path], kind: str
) -> None:
    base = make(tmp_path / "base")
    targets, new = (["query", "dense"], ["pooler"]) if make is bert else (LINEAR, [])
    settings = {"task_type": TaskType.SEQ_CLS, "target_modules": targets, "modules_to_save": new} | KINDS[kind]
    if make is bert:
        settings["exclude_modules"] = r".*pooler.*"
    torch.manual_seed(5)
    loaded = classifier(base)
    loaded.config.pad_token_id = 0
    adapted = adapt(loaded, tmp_path / "adapter", **settings)
    words_tokenizer().save_pretrained(tmp_path / "adapter")
    run(tmp_path / "adapter", tmp_path / "out")
    torch.manual_seed(99)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert largest_difference(logits(merged), logits(adapted)) < 1e-5
    assert largest_difference(logits(merged), logits(adapted.merge_and_unload())) < 1e-5
    assert merged.config.id2label == LABELS
    assert merged.config.architectures == [type(loaded).__name__]
    answers: Any = pipeline("text-classification", str(tmp_path / "out"))(["మంచి ok", "ok"])
    assert {answer["label"] for answer in answers} <= set(LABELS.values())
    assert not (tmp_path / "out/generation_config.json").exists()


def test_the_older_names_of_a_checkpoint_are_known(tmp_path: Path) -> None:
    base = bert(tmp_path / "base")
    settings: dict[str, Any] = {"task_type": TaskType.SEQ_CLS, "target_modules": ["query"]}
    adapted = adapt(classifier(base), tmp_path / "adapter", modules_to_save=["pooler"], **settings)
    tensors = load_file(base / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file(old, base / "model.safetensors", metadata={"format": "pt"})
    record_base(tmp_path / "adapter", str(base))
    run(tmp_path / "adapter", tmp_path / "out")
    merged = logits(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"))
    assert largest_difference(merged, logits(adapted)) < 1e-5


@pytest.mark.more
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_layers_that_hold_their_weights_transposed(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=1, n_head=2, n_positions=64, initializer_range=0.2)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "base")
    settings = KINDS[kind] | {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    adapted = adapt(causal(tmp_path / "base"), tmp_path / "adapter", **settings)
    run(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    assert largest_difference(logits(causal(tmp_path / "out")), logits(adapted)) < 1e-5
    quantised_base = quantised(tmp_path / "base", causal, nf4())
    adapt(quantised_base, tmp_path / "of qlora", target_modules=["c_attn"])
    with refused("adapter-cannot-be-merged", "Conv1D"):
        run(tmp_path / "of qlora", tmp_path / "out 2")


def nf4(**settings: Any) -> BitsAndBytesConfig:
    """The quantisation of QLoRA, or one that differs in some settings."""
    config = nf4_config()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def quantised(base: Path, load: Callable[..., Any], config: BitsAndBytesConfig | None) -> Any:
    """A base as QLoRA trains on it: loaded in bf16, its linear layers in 4 bit, the rest put into fp32 after that."""
    model = load(base, dtype=torch.bfloat16, **({} if config is None else {"quantization_config": config}))
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
    return model


def in_fp32(model: Any) -> Any:
    """A model with the same weights, computed in fp32: bitsandbytes computes in bf16, which alone moves the logits."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            weight: Any = module.weight
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = dequantize_4bit(weight.data, weight.quant_state).float()
            if module.bias is not None:
                linear.bias.data = module.bias.data.float()
            model.set_submodule(name, linear)
    return model


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.more)], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    "config",
    [
        nf4(),
        pytest.param(nf4(bnb_4bit_use_double_quant=False, llm_int8_skip_modules=None), marks=pytest.mark.more),
        pytest.param(nf4(bnb_4bit_quant_type="fp4"), marks=pytest.mark.more),
    ],
    ids=["ours", "single, default skips", "fp4"],
)
def test_an_adapter_of_qlora_is_merged_into_the_weights_that_it_was_trained_on(
    tmp_path: Path, config: BitsAndBytesConfig, kind: str, tied: bool
) -> None:
    base = llama(tmp_path / "base", tied)
    adapted = adapt(quantised(base, causal, config), tmp_path / "adapter", **KINDS[kind])
    run(tmp_path / "adapter", tmp_path / "as trained", dtype="float32")
    run(tmp_path / "adapter", tmp_path / "original", dtype="float32", base_weights="original")
    as_trained, original = (logits(causal(tmp_path / name)) for name in ("as trained", "original"))
    computed_in_bf16 = logits(adapted)
    assert largest_difference(as_trained, logits(in_fp32(adapted))) < 1e-5
    assert largest_difference(as_trained, computed_in_bf16) * 5 < largest_difference(original, computed_in_bf16)
    path = tmp_path / "adapter/base_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": None}))  # then it was bf16
    run(tmp_path / "adapter", tmp_path / "again", dtype="float32")
    assert torch.equal(logits(causal(tmp_path / "again")), as_trained)
    written = json.loads((tmp_path / "as trained/config.json").read_text())
    assert "quantization_config" not in written
    assert written["dtype"] == "float32"


def test_a_classifier_of_qlora_keeps_its_new_modules_unrounded(tmp_path: Path) -> None:
    base = bert(tmp_path / "base")
    torch.manual_seed(5)
    settings = {
        "task_type": TaskType.SEQ_CLS,
        "target_modules": ["query", "output.dense"],
        "modules_to_save": ["pooler"],
    }
    adapted = adapt(quantised(base, classifier, nf4()), tmp_path / "adapter", **settings)
    run(tmp_path / "adapter", tmp_path / "out")
    assert largest_difference(logits(classifier(tmp_path / "out")), logits(in_fp32(adapted))) < 1e-5


@pytest.mark.parametrize("method", [pytest.param("lora", marks=pytest.mark.more), "qlora"])
def test_what_a_run_saves_is_merged(tmp_path: Path, method: Method) -> None:
    """The loaders of the training scripts themselves, in the place of peft and transformers alone."""
    language_model, encoder = llama(tmp_path / "llama"), bert(tmp_path / "bert")
    for base, name in ((language_model, "causal"), (encoder, "classifier")):
        args = ModelArguments(str(base), method=method, lora_dropout=0.0)
        tokenizer = load_tokenizer(args)
        model: Any
        if base == language_model:
            model = load_causal(args, tokenizer, torch.float32, ends=[2])
        else:
            model = load_classifier(args, list(LABELS.values()), tokenizer)
        randomise(model)
        model.save_pretrained(str(tmp_path / name))
        save_adapter_extras(model, tmp_path / name)
        run(tmp_path / name, tmp_path / f"{name} merged", dtype="float32")
        trained = logits(in_fp32(model).float())
        load: Any = causal if base == language_model else AutoModelForSequenceClassification.from_pretrained
        assert largest_difference(logits(load(tmp_path / f"{name} merged")), trained) < 1e-5


def in_4bit(folder: Path) -> int:
    """The number of weights that a model's file holds in 4 bit."""
    return sum(name.endswith(".absmax") for name in load_file(folder / "model.safetensors"))


def test_a_base_that_is_stored_in_4_bit_is_dequantised(tmp_path: Path) -> None:
    stored = causal(llama(tmp_path / "whole"), dtype=torch.bfloat16, quantization_config=nf4())
    stored.save_pretrained(tmp_path / "base")
    words_tokenizer().save_pretrained(tmp_path / "base")
    assert in_4bit(tmp_path / "base") == 14
    adapted = adapt(quantised(tmp_path / "base", causal, None), tmp_path / "adapter")
    run(tmp_path / "adapter", tmp_path / "out", dtype="float32")
    run(tmp_path / "adapter", tmp_path / "original", base_weights="original")
    trained = logits(in_fp32(adapted))
    assert largest_difference(logits(causal(tmp_path / "out")), trained) < 1e-5
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert in_4bit(tmp_path / "original") == 0


def test_4_bit_is_written_only_when_asked_and_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = llama(tmp_path / "base")
    adapt(quantised(base, causal, nf4()), tmp_path / "adapter")
    run(tmp_path / "adapter", tmp_path / "out", to_4bit=True, dtype="bfloat16")
    assert "--to_4bit rounds the merged weights again" in capsys.readouterr().err
    assert in_4bit(tmp_path / "out") == 14
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter", "out"}


@pytest.mark.more
def test_many_small_files_hold_the_same_model_as_one(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    adapted = adapt(causal(base), tmp_path / "adapter")
    run(tmp_path / "adapter", tmp_path / "one")
    run(tmp_path / "adapter", tmp_path / "many", max_shard_size="50KB")
    files = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(files) > 5
    assert max(path.stat().st_size for path in files) < 53_000
    parts: dict[str, torch.Tensor] = {}
    for path in files:
        parts |= load_file(path)
    one = load_file(tmp_path / "one/model.safetensors")
    assert parts.keys() == one.keys() == load_file(base / "model.safetensors").keys()
    assert all(torch.equal(parts[name], one[name]) for name in one)
    assert torch.equal(logits(causal(tmp_path / "many")), logits(causal(tmp_path / "one")))
    assert largest_difference(logits(causal(tmp_path / "many")), logits(adapted)) < 1e-5
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    adapt(causal(tmp_path / "many"), tmp_path / "again")  # a base of several files
    run(tmp_path / "again", tmp_path / "twice")


@pytest.mark.parametrize(("stored", "asked", "written"), [
    (torch.bfloat16, None, "bfloat16"), (torch.float32, None, "float32"), (torch.bfloat16, "float16", "float16"),
])  # fmt: skip
def test_the_type_is_that_of_the_checkpoint_or_the_one_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: Any, written: str
) -> None:
    base = llama(tmp_path / "base", dtype=stored)
    adapt(causal(base), tmp_path / "adapter")
    (tmp_path / "adapter/base_config.json").unlink()  # as of other tools: the base's own configuration serves
    said = run(tmp_path / "adapter", tmp_path / "out", dtype=asked)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{written}"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == written
    assert said == f"{tmp_path / 'out'}: LlamaForCausalLM in {written}, merged from {tmp_path / 'adapter'} and {base}."


def test_weights_beyond_the_range_of_the_type_are_refused(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapt(causal(base), tmp_path / "adapter")
    with refused("merged-weights-not-finite", "model.norm.weight", "torch.float16", flag="--dtype"):
        run(tmp_path / "adapter", tmp_path / "out", dtype="float16")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}  # nothing half-written


def test_tokenizer_template_and_generation_settings_come_along(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    adapt(causal(base), tmp_path / "adapter")
    run(tmp_path / "adapter", tmp_path / "of the base")
    assert AutoTokenizer.from_pretrained(tmp_path / "of the base").chat_template == CHAT_TEMPLATE
    assert (tmp_path / "of the base/generation_config.json").is_file()
    tokenizer = words_tokenizer(None)
    tokenizer.chat_template = "{{ 'trained' }}"
    tokenizer.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    run(tmp_path / "adapter", tmp_path / "of the adapter")
    assert AutoTokenizer.from_pretrained(tmp_path / "of the adapter").chat_template == "{{ 'trained' }}"
    assert causal(tmp_path / "of the adapter").generation_config.temperature == 0.5


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter as other tools make it, without a record of its base."""
    base = llama(tmp_path / "base")
    adapt(causal(base), tmp_path / "adapter")
    (tmp_path / "adapter/base_model.json").unlink()
    return tmp_path / "adapter"


def edit(folder: Path, **settings: Any) -> None:
    """Change settings of an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of an adapter."""
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q_PROJ}.lora_A.weight"]


def empty(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q_PROJ}.lora_B.weight"] = torch.empty(0)


def stray(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(4, 64)


@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (lambda folder: change(folder, half), "adapter-does-not-fit", "layers.0.self_attn.q_proj"),
        (lambda folder: change(folder, empty), "adapter-does-not-fit", "size mismatch"),
        (lambda folder: change(folder, stray), "adapter-does-not-fit", "layers.9.mlp.up_proj"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"no"), "adapter-does-not-fit", "header"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter-without-weights", ""),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "adapter-pickled",
            "",
        ),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter-config-unreadable", ""),
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter-config-unreadable", "No such file"),
        (lambda folder: edit(folder, peft_type="IA3"), "adapter-kind", "peft_type 'IA3'"),
        (lambda folder: edit(folder, task_type="SEQ_2_SEQ_LM"), "adapter-task", "SEQ_2_SEQ_LM"),
        (lambda folder: edit(folder, use_dora=True), "adapter-does-not-fit", "lora_magnitude_vector"),
        (lambda folder: edit(folder, base_model_name_or_path=None), "base-unknown", ""),
        (
            lambda folder: edit(folder, base_model_name_or_path="some-org/some-model"),
            "model-not-found-offline",
            "some-org/some-model",
        ),
        (
            lambda folder: (folder / "chat_template.jinja").symlink_to("../base/config.json"),
            "link-outside-model",
            "/base/config.json",
        ),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(
    adapter: Path, spoil: Callable[[Path], Any], code: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(adapter)
    out = adapter.parent / "out"
    assert main(["merge", str(adapter), "--output_dir", str(out)]) == 2
    shown = capsys.readouterr()
    with refused(code, named) as caught:
        run(adapter, out)
    assert shown.out == ""
    assert shown.err.endswith(f"indictune: {caught.value.message}\n")
    assert {path.name for path in adapter.parent.iterdir()} == {"base", "adapter"}


def without_weights(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


def without_a_tensor(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, base / "model.safetensors")


def linked(base: Path) -> None:
    (base / "config.json").rename(base.parent / "adapter" / "of_the_base.json")
    (base / "config.json").symlink_to("../adapter/of_the_base.json")


@pytest.mark.parametrize(
    ("spoil", "code", "named"),
    [
        (without_weights, "pickle-refused", ""),
        (without_a_tensor, "adapter-does-not-fit", "model.norm.weight"),
        (lambda base: (base / "config.json").unlink(), "folder-without-model", ""),
        (linked, "link-outside-model", "of_the_base.json"),
        (lambda base: (base / "model.safetensors").write_bytes(b"no"), "model-unreadable", ""),
        (lambda base: (base / "model.safetensors").unlink(), "weights-not-found", "model.safetensors"),
    ],
)
def test_a_base_that_cannot_be_merged_is_refused(
    adapter: Path, spoil: Callable[[Path], Any], code: str, named: str
) -> None:
    spoil(adapter.parent / "base")
    with refused(code, named):
        run(adapter, adapter.parent / "out")
    assert {path.name for path in adapter.parent.iterdir()} == {"base", "adapter"}


def test_dequantised_weights_are_for_an_adapter_that_says_how(adapter: Path) -> None:
    with refused("base-was-not-quantised", flag="--base_weights"):
        run(adapter, adapter.parent / "out", base_weights="dequantised")


def test_the_base_is_the_one_of_the_training(adapter: Path) -> None:
    base = adapter.parent / "base"
    record_base(adapter, str(base))
    moved = base.rename(adapter.parent / "moved")
    with refused("no-such-model-folder", str(base), flag="--base_model"):
        run(adapter, adapter.parent / "out")
    run(adapter, adapter.parent / "out", base_model=str(moved))
    llama(adapter.parent / "other", seed=7)
    with refused("base-weights-differ"):
        run(adapter, adapter.parent / "out 2", base_model=str(adapter.parent / "other"))
    with refused("base-revision-differs", "v2", flag="--base_revision"):
        run(adapter, adapter.parent / "out 2", base_model=str(moved), base_revision="v2")


def test_a_base_that_is_not_there_is_named_by_the_flag_of_merge(adapter: Path) -> None:
    with refused("no-such-name", "builtin:nope", flag="--base_model"):
        run(adapter, adapter.parent / "out", base_model="builtin:nope")


def test_the_command_prints_nothing_of_other_libraries(adapter: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["merge", str(adapter), "--output_dir", str(adapter.parent / "quiet")]) == 0
    shown = capfd.readouterr()
    assert "merged from" in shown.out
    assert [word for word in ("FutureWarning", "%|", "it/s") if word in shown.out + shown.err] == []


def test_a_used_folder_and_a_missing_adapter_are_reported_together(adapter: Path) -> None:
    out = adapter.parent / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(UserError) as caught:
        run(adapter.parent / "gone", out)
    found = [(each.code, each.flag) for each in caught.value.problems]
    assert found == [("folder-not-empty", "--output_dir"), ("adapter-config-unreadable", "--model")]
    assert (out / "mine.txt").read_text() == "mine"
    (out / "mine.txt").unlink()
    run(adapter, out)
    assert (out / "model.safetensors").is_file()


def test_a_failure_while_writing_leaves_nothing(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with refused("folder-not-written", "new/out", "No space left"):
        run(adapter, adapter.parent / "new/out")
    assert list((adapter.parent / "new").iterdir()) == []


@pytest.mark.more
def test_a_merge_that_is_stopped_or_killed_leaves_no_part_of_a_model(adapter: Path) -> None:
    neighbours = {"base", "adapter"}
    for name, code, left in (("SIGTERM", 75, set()), ("SIGINT", 75, set()), ("SIGKILL", -9, {".out.unfinished"})):
        faulty = [*python(), "tests/faults/faulty.py", f"{name}@indictune.commands.merge:match_config_mode:1"]
        flags = ["merge", str(adapter), "--output_dir", str(adapter.parent / "out")]
        result = start([*faulty, "indictune/__main__.py", *flags])
        assert result.returncode == code, result.stderr
        assert {path.name for path in adapter.parent.iterdir()} == neighbours | left
        if code == 75:
            assert "Nothing is left half-written" in result.stderr
            assert "Traceback" not in result.stderr
    with refused("folder-in-use", ".out.unfinished"):
        run(adapter, adapter.parent / "out")


def test_a_file_that_was_not_written_whole_is_noticed(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = PreTrainedModel.save_pretrained

    def lose_one(model: Any, folder: Path, **settings: Any) -> None:
        save(model, folder, **settings)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"model.norm.weight": torch.zeros(64)}, folder / "model.safetensors")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", lose_one)
    with pytest.raises(RuntimeError, match=r"differ from the merged ones, first model\.norm\.weight"):
        run(adapter, adapter.parent / "out")
    assert {path.name for path in adapter.parent.iterdir()} == {"base", "adapter"}


def test_a_full_disk_and_an_impossible_folder_are_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("folder-not-writable", "config.json/out", flag="--output_dir"):
        run(adapter, adapter / "base_config.json/out")
    usage = shutil.disk_usage(adapter)._replace(free=300_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with refused("disk-too-small", flag="--output_dir"):
        run(adapter, adapter.parent / "out")
    assert {path.name for path in adapter.parent.iterdir()} == {"base", "adapter"}


def test_a_branch_that_moved_on_the_hub_is_taken_as_it_was(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = adapter.parent / "cache"
    then, now = "0" * 40, "1" * 40
    repository = cache / "models--org--model"
    for commit, seed in ((then, 1), (now, 7)):
        llama(repository / "snapshots" / commit, seed=seed)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(now)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    record_base(adapter, "org/model", "main", then)
    run(adapter, adapter.parent / "out")
    run(adapter, adapter.parent / "from the folder", base_model=str(adapter.parent / "base"))
    assert torch.equal(*(logits(causal(adapter.parent / name)) for name in ("out", "from the folder")))


def test_every_problem_of_the_flags_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", "--max_shard_size", "big"]) == 2
    shown = capsys.readouterr().err
    for code in ("argument-missing", "output-dir-missing", "shard-size"):
        assert f"[{code}]" in shown


def test_the_command_merges_and_says_what_it_wrote(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = adapter.parent / "out"
    assert main(["merge", str(adapter), "--output_dir", str(out), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: LlamaForCausalLM in bfloat16, merged from {adapter} and ")
