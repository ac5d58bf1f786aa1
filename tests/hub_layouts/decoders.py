"""Tiny decoders in the layout of published ones: names of files, form of weights, keys of settings, oddities.

Layouts were read on 2026-11-28 in the public listings of the repositories; where a file is gated, in copies of it.
Weights are random, and all texts are invented.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.data.published_templates import AIRAVATA, GEMMA_3, LLAMA_2, LLAMA_3_2, QWEN_3, SARVAM_M
from tests.hub_layouts import tiny
from tests.hub_layouts.python_code import BIDIRECTIONAL_GEMMA
from tests.hub_layouts.tiny import DECODER, PAGE, Files, as_json, saved_tokenizer, special_tokens

_GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")


def _gemma_settings(vocab_size: int) -> dict[str, Any]:
    return DECODER | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "vocab_size": vocab_size,
        "sliding_window": 16,
        "max_position_embeddings": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "attention_bias": False,
        "use_cache": True,
        "layer_types": ["sliding_attention", "full_attention"],
        "torch_dtype": "bfloat16",
    }


def _gemma_tokenizer(**more: Any) -> Files:
    tokenizer = tiny.byte_fallback(_GEMMA_SPECIALS)
    about = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, **more}
    about |= {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return {
        "special_tokens_map.json": special_tokens(bos="<bos>", eos="<eos>", pad="<pad>", unk="<unk>"),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": as_json(about),
    }


@cache
def gemma_3() -> Files:
    """Gemma 3 (text, instructions): gated, tied, a template that alternates strictly."""
    tokenizer = tiny.byte_fallback(_GEMMA_SPECIALS)
    settings = _gemma_settings(tokenizer.get_vocab_size())
    settings |= {"architectures": ["Gemma3ForCausalLM"], "eos_token_id": [1, tokenizer.token_to_id("<end_of_turn>")]}
    config = Gemma3TextConfig(**{name: value for name, value in settings.items() if name != "architectures"})
    weights = tiny.random_weights(Gemma3ForCausalLM, config, torch.bfloat16)
    return {
        "README.md": PAGE,
        "added_tokens.json": as_json({}),
        "config.json": as_json(settings | {"sliding_window_pattern": 2, "cache_implementation": "hybrid"}),
        "generation_config.json": as_json(
            {"bos_token_id": 2, "eos_token_id": settings["eos_token_id"], "pad_token_id": 0}
        ),
        "model.safetensors": tiny.safe(weights, ("lm_head.weight",)),
        **_gemma_tokenizer(chat_template=GEMMA_3),
    }


@cache
def indicbert_v3() -> Files:
    """IndicBERT v3: a gated Gemma 3 that its own code makes bidirectional; no chat template."""
    tokenizer = tiny.byte_fallback(_GEMMA_SPECIALS)
    settings = _gemma_settings(tokenizer.get_vocab_size())
    config = Gemma3TextConfig(**settings)
    weights = tiny.random_weights(Gemma3ForCausalLM, config, torch.bfloat16)
    own = {
        "architectures": ["Gemma3BiForMNTP"],
        "auto_map": {
            "AutoModel": "bidirection_gemma3.Gemma3BiModel",
            "AutoModelForMaskedLM": "bidirection_gemma3.Gemma3BiForMNTP",
        },
    }
    return {
        ".gitattributes": b"tokenizer.json filter=lfs\n",
        "README.md": PAGE,
        "bidirection_gemma3.py": BIDIRECTIONAL_GEMMA.encode(),
        "config.json": as_json(settings | own),
        "generation_config.json": as_json({"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}),
        "model.safetensors": tiny.safe(weights, ("lm_head.weight",)),
        **_gemma_tokenizer(),
    }


_LLAMA_SPECIALS = ("<unk>", "<s>", "</s>")


def _llama_tokenizer(others: tuple[str, ...] = (), **about: Any) -> Files:
    tokenizer = tiny.byte_fallback(_LLAMA_SPECIALS, others=others)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "special_tokens_map.json": as_json({**tokens, **({"pad_token": "<pad>"} if "<pad>" in others else {})}),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": as_json({"tokenizer_class": "LlamaTokenizer", "legacy": False, **tokens, **about}),
    }


def _llama_settings(vocab_size: int, **more: Any) -> dict[str, Any]:
    return DECODER | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **more,
    }


def _llama_weights(settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    config = LlamaConfig(**{name: value for name, value in settings.items() if name != "architectures"})
    return tiny.random_weights(LlamaForCausalLM, config, dtype)


@cache
def sarvam_1() -> Files:
    """Sarvam-1: a base LLaMA with a template all the same, thousands of added tokens, no padding token, two shards."""
    others = tuple(f"<extra_{number}>" for number in range(40))
    size = tiny.byte_fallback(_LLAMA_SPECIALS, others=others).get_vocab_size()
    settings = _llama_settings(size, _name_or_path="sarvamai/sarvam-1", transformers_version="4.45.2")
    return {
        "LICENSE.md": b"A licence.\n",
        "README.md": PAGE,
        "config.json": as_json(settings),
        "generation_config.json": as_json({"do_sample": True, "temperature": 0.1, "top_p": 0.95, "max_length": 256}),
        **tiny.sharded(_llama_weights(settings), 2),
        **_llama_tokenizer(others, chat_template=LLAMA_2, pad_token=None, model_max_length=int(1e30)),
        "tokenizer.model": tiny.sentencepiece_model(300),
    }


@cache
def sarvam_m() -> Files:
    """Sarvam-M: a Mistral whose template thinks by default and has no marks; `head_dim` is not hidden / heads."""
    specials = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<think>", "</think>")
    return _mistral(specials, SARVAM_M, is_pickled=False, activation="silu", sliding_window=None)


@cache
def krutrim_2() -> Files:
    """Krutrim-2: a Mistral with float32 pickles in shards only, and a template of plain words."""
    return _mistral(("<pad>",), AIRAVATA, is_pickled=True, sliding_window=16)


def _mistral(others: tuple[str, ...], template: str, is_pickled: bool, **more: Any) -> Files:
    size = tiny.byte_fallback(_LLAMA_SPECIALS, others=others).get_vocab_size()
    settings = _llama_settings(size, **more, head_dim=8, use_cache=False)
    settings |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    known = {name: value for name, value in settings.items() if name not in ("architectures", "activation")}
    weights = tiny.random_weights(
        MistralForCausalLM, MistralConfig(**known), torch.float32 if is_pickled else torch.bfloat16
    )
    kind = {"tokenizer_class": "PreTrainedTokenizerFast" if is_pickled else "LlamaTokenizerFast"}
    padding = {"pad_token": "<pad>"} if is_pickled else {}
    return {
        "README.md": PAGE if is_pickled else b"---\nbase_model: mistralai/Mistral-Small-3.1-24B-Base-2503\n---\n",
        "config.json": as_json(settings),
        "generation_config.json": as_json({"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}),
        **tiny.sharded(weights, 3, is_safe=not is_pickled),
        **_llama_tokenizer(others, **kind, **padding, chat_template=template, model_max_length=128),
    }


@cache
def airavata() -> Files:
    """Airavata: a LLaMA 2 with one row for its padding token, and its template in a program, not in the repository."""
    size = tiny.byte_fallback(_LLAMA_SPECIALS, others=("<pad>",)).get_vocab_size()
    settings = _llama_settings(size, rms_norm_eps=1e-5, transformers_version="4.37.1")
    return {
        "Airavata.gguf": b"\0" * 64,
        "README.md": PAGE,
        "added_tokens.json": as_json({"<pad>": size - 1}),
        "config.json": as_json(settings),
        "generation_config.json": as_json({"bos_token_id": 1, "eos_token_id": 2}),
        **tiny.sharded(_llama_weights(settings), 3),
        **_llama_tokenizer(("<pad>",), pad_token="<pad>"),
        "tokenizer.model": tiny.sentencepiece_model(300),
    }


@cache
def llama_3_2() -> Files:
    """Llama 3.2 Instruct: gated, tied, three tokens that end a text, no padding token, a template with the date."""
    specials = (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
    )
    tokenizer = tiny.byte_level(specials)
    begin, end, *_, eom, eot = (tokenizer.token_to_id(each) for each in specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{specials[0]} $A",
        pair=f"{specials[0]} $A {specials[0]}:1 $B:1",
        special_tokens=[(specials[0], begin)],
    )
    rope = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    settings = _llama_settings(
        tokenizer.get_vocab_size(), bos_token_id=begin, eos_token_id=[end, eom, eot], rope_theta=500000.0,
        rope_scaling=rope | {"original_max_position_embeddings": 64}, tie_word_embeddings=True,
    )  # fmt: skip
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    about |= {"bos_token": specials[0], "eos_token": specials[-1], "chat_template": LLAMA_3_2}
    return {
        "LICENSE.txt": b"A licence.\n",
        "README.md": PAGE,
        "config.json": as_json(settings),
        "generation_config.json": as_json({"bos_token_id": begin, "eos_token_id": [end, eom, eot], "do_sample": True}),
        "model.safetensors": tiny.safe(_llama_weights(settings), ("lm_head.weight",)),
        "original/params.json": as_json({}),
        "special_tokens_map.json": special_tokens(bos=specials[0], eos=specials[-1]),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": as_json(about),
    }


@cache
def qwen_3() -> Files:
    """Qwen 3: no `bos`, no map of special tokens, an output layer in the file although it is tied, thinking."""
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    tokenizer = tiny.byte_level(specials)
    ids = {each: tokenizer.token_to_id(each) for each in specials}
    settings = DECODER | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_cache": True,
    }
    known = {name: value for name, value in settings.items() if name != "architectures"}
    weights = tiny.random_weights(Qwen3ForCausalLM, Qwen3Config(**known), torch.bfloat16)
    about: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"}
    about |= {"add_bos_token": False}
    about |= {"pad_token": "<|endoftext|>", "unk_token": None, "model_max_length": 256, "chat_template": QWEN_3}
    return {
        "LICENSE": b"A licence.\n",
        "README.md": PAGE,
        "config.json": as_json(settings),
        "generation_config.json": as_json(
            {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "do_sample": True}
        ),
        "model.safetensors": tiny.safe(weights),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": as_json(about),
    }
