"""Taggers on decoders: those of transformers for LLaMA and Qwen 3, and ours for Gemma 3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForTokenClassification,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from indictune.api import predict
from indictune.commands.merge import MergeFlags, merge_adapter
from indictune.config.arguments import ModelArguments
from indictune.files import write_yaml
from indictune.models.adapters import save_adapter_extras
from indictune.models.config_shapes import meta_model
from indictune.models.load import load_config, load_tokenizer, load_trained, read_config
from indictune.models.task_models import load_classifier
from tests.models.tiny import SMALL, WORDS, words_tokenizer

TAGS = ["B-PER", "I-PER", "O"]
DECODER: dict[str, Any] = SMALL | {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 32}
GEMMA = DECODER | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
DECODERS: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3TextConfig(**GEMMA),
    "gemma3-bidirectional": Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True),
    "llama": LlamaConfig(**DECODER),
    "qwen3": Qwen3Config(**DECODER),
}
every_decoder = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "gemma3-bidirectional" else pytest.mark.more) for name in DECODERS],
)


def base(folder: Path, name: str) -> str:
    torch.manual_seed(1)
    model: Any = AutoModel.from_config(DECODERS[name])  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return str(folder)


def tagger(folder: Path, name: str, method: Any = "full") -> Path:
    """A tagger on a base of random weights, saved as a finished run saves it."""
    args = ModelArguments(base(folder / "base", name), method=method, lora_r=4)
    kind = AutoModelForTokenClassification
    config = load_config(args, kind, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "classifier of tokens")
    tokenizer = load_tokenizer(args)
    torch.manual_seed(2)
    model = load_classifier(args, TAGS, tokenizer, None, config, AutoModelForTokenClassification)
    for weight in (each for each in model.parameters() if each.requires_grad and each.ndim > 1):
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(str(folder))
    save_adapter_extras(model, folder)
    tokenizer.save_pretrained(folder)
    write_yaml(folder / "recipe.yaml", {"max_length": 16})
    return folder


def logits_of(folder: Path, words: list[str]) -> torch.Tensor:
    model: Any = load_trained(folder, kind=AutoModelForTokenClassification).eval()
    with torch.no_grad():
        ids = words_tokenizer()(words, is_split_into_words=True, return_tensors="pt")
        found: torch.Tensor = model(**ids).logits[0]
    return found


@every_decoder
def test_a_word_sees_later_ones_only_if_the_configuration_says_so(tmp_path: Path, name: str) -> None:
    folder = tagger(tmp_path, name)
    first, changed = (logits_of(folder, [*WORDS[:4], *later]) for later in (WORDS[4:6], WORDS[6:8]))
    permuted = logits_of(folder, [*WORDS[:4], *WORDS[5:3:-1]])
    sees_later = name == "gemma3-bidirectional"
    for other in (changed, permuted):
        assert torch.allclose(first[:4], other[:4], atol=1e-6) != sees_later
        assert not torch.allclose(first[4:], other[4:], atol=1e-4)


def test_a_bidirectional_window_stays_as_wide_when_a_tagger_is_read_again(tmp_path: Path) -> None:
    folder = tagger(tmp_path, "gemma3-bidirectional")
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 8
    assert AutoConfig.from_pretrained(folder).sliding_window == DECODERS["gemma3-bidirectional"].sliding_window == 5


@every_decoder
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_saved_tagger_gives_each_word_its_tag(tmp_path: Path, name: str, method: str) -> None:
    folder = tagger(tmp_path, name, method)
    best = logits_of(folder, WORDS).argmax(-1).tolist()
    texts = [" ".join(WORDS), "", " ".join([WORDS[0]] * 18)]
    whole, nothing, cut = predict(texts, folder)
    assert whole == {"text": texts[0], "label": [TAGS[each] for each in best], "language": whole["language"]}
    assert len(set(best)) > 1
    assert (nothing["label"], len(cut["label"]), cut["label"][16:]) == (None, 18, ["", ""])
    assert "" not in cut["label"][:16]


@every_decoder
def test_an_adapter_of_a_tagger_trains_its_head_whole_and_merges(tmp_path: Path, name: str) -> None:
    folder = tagger(tmp_path / "adapter", name, "lora")
    model = load_trained(folder, kind=AutoModelForTokenClassification)
    assert isinstance(model, PeftModel)
    assert not [key for key, _ in model.named_parameters() if "score" in key and "lora" in key]
    assert "modules_to_save.default" in next(key for key, _ in model.named_parameters() if "score.modules" in key)
    merge_adapter(MergeFlags(str(folder), str(tmp_path / "merged")))
    assert torch.allclose(logits_of(tmp_path / "merged", WORDS), logits_of(folder, WORDS), atol=1e-4)
    args = ModelArguments(str(folder / "base"), method="lora", lora_r=4)
    sizes = meta_model(args, read_config(args), "ForTokenClassification")
    assert sizes.counts.trained > 0


def test_transformers_has_no_tagger_on_gemma_3() -> None:
    """If it has one, `models/token_heads.py` can go."""
    assert "gemma3_text" not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    assert {"llama", "qwen3"} <= MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.keys()
