"""Tiny models with random weights, made in a folder, and a tokenizer of whole words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AlbertConfig,
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

WORDS = ["अच्छा", "बुरा", "మంచి", "చెడు", "நல்ல", "மோசம்", "ok", "."]
SMALL: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert": lambda: BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=64),
    "albert": lambda: AlbertConfig(**SMALL, embedding_size=16, intermediate_size=64, max_position_embeddings=64),
    "xlm-roberta": lambda: XLMRobertaConfig(
        **SMALL, intermediate_size=64, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1
    ),
    "roberta": lambda: RobertaConfig(
        **SMALL, intermediate_size=64, max_position_embeddings=66, type_vocab_size=1, pad_token_id=1
    ),
    "modernbert": lambda: ModernBertConfig(
        **SMALL, intermediate_size=64, max_position_embeddings=64, pad_token_id=0, local_attention=16
    ),
    "llama": lambda: LlamaConfig(
        **SMALL,
        intermediate_size=64,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
}

_GROUPED: dict[str, Any] = {
    "intermediate_size": 64,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

DECODERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3_text": lambda: Gemma3TextConfig(
        **SMALL, **_GROUPED, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3": lambda: Qwen3Config(**SMALL, **_GROUPED),
}


def words_tokenizer(pad_token: str | None = "[PAD]") -> PreTrainedTokenizerFast:
    """Ids: [PAD] 0, [UNK] 1, </s> 2, then WORDS."""
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "</s>", *WORDS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        unk_token="[UNK]",
        eos_token="</s>",
        pad_token=pad_token,
        model_input_names=["input_ids", "attention_mask"],
    )
