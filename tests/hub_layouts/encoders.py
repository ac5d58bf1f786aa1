"""Tiny encoders in the layout of published ones: names of files, form of weights, keys of settings, oddities.

Layouts were read on 2026-11-28 in the public listings of the repositories; where a file is gated, in copies of it.
Weights are random, and all texts are invented.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from tests.hub_layouts import tiny
from tests.hub_layouts.tiny import PAGE, SMALL, Files, as_json, saved_tokenizer, special_tokens

_LANGUAGES = "as bd bn dg en gom gu hi kha kn ks mai ml mni mr ne or pa sa sd sat ta te ur"
LANGUAGES = tuple(f"<{each}>" for each in _LANGUAGES.split())
BERT_SPECIALS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


@cache
def indicbert_v2(seed: int = 0) -> tuple[Files, Files]:
    """IndicBERTv2 (all four): only a pickle on `main`; a bot's pull request has safetensors.

    The padding token of the configuration is not that of the tokenizer. The pickle has a buffer of positions, which
    transformers has not saved since 4.31.
    """
    tokenizer = tiny.wordpiece((*BERT_SPECIALS, *LANGUAGES))
    settings = SMALL | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    config = BertConfig(**settings, pad_token_id=0)
    weights = tiny.random_weights(BertForMaskedLM, config, seed=seed)
    published = settings | {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "embedding_size": 32,
        "type_vocab_size": 2,
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "classifier_dropout": None,
        "use_cache": True,
        "torch_dtype": "float32",
        "transformers_version": "4.20.1",
    }
    positions = {"bert.embeddings.position_ids": torch.arange(128)[None]}
    main = {
        ".gitattributes": b"*.bin filter=lfs\n",
        "README.md": PAGE,
        "config.json": as_json(published),
        "pytorch_model.bin": tiny.pickled(weights | positions),
        "special_tokens_map.json": special_tokens(unk="[UNK]", cls="[CLS]", sep="[SEP]", pad="[PAD]", mask="[MASK]"),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": as_json({"tokenizer_class": "PreTrainedTokenizerFast"}),
    }
    # The bot's copy has other numbers here, so that a test sees which of both was read.
    other = {name: tensor + 1 for name, tensor in weights.items() if tensor.is_floating_point()}
    tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    return main, main | {"model.safetensors": tiny.safe(other, tied)}


@cache
def indicbert_v1() -> Files:
    """IndicBERT v1: an ALBERT with sentencepiece's files, a pickle of before torch 1.6, TensorFlow's checkpoint."""
    settings: dict[str, Any] = {
        "embedding_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "hidden_act": "gelu",
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "attention_probs_dropout_prob": 0,
        "hidden_dropout_prob": 0,
        "classifier_dropout_prob": 0.1,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "vocab_size": 320,
    }
    unused = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0}
    weights = tiny.random_weights(AlbertForPreTraining, AlbertConfig(**settings))
    pieces = tiny.sentencepiece_model(
        300, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, pad_piece="<pad>", control_symbols="[CLS],[SEP],[MASK]"
    )
    return {
        ".gitattributes": b"*.bin filter=lfs\n",
        "README.md": PAGE,
        "config.json": as_json({"model_type": "albert", **settings, **unused}),
        "pytorch_model.bin": tiny.pickled(weights, is_zip=False),
        "spiece.model": pieces,
        "spiece.vocab": b"<pad>\t0\n",
        "tf_model.ckpt.data-00000-of-00001": b"\0" * 64,
        "tf_model.ckpt.index": b"\0" * 64,
        "tf_model.ckpt.meta": b"\0" * 64,
    }


def _muril_tokenizer(**more: Any) -> bytes:
    about = {"do_lower_case": False, "lowercase": False, "strip_accents": False, "tokenize_chinese_chars": True}
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    return as_json({**about, **tokens, "model_max_length": 128, **more})


@cache
def muril() -> Files:
    """MuRIL: `vocab.txt` without tokenizer.json, a pickle, and copies for TensorFlow and Flax."""
    tokenizer = tiny.wordpiece(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), lowercase=False)
    settings = SMALL | {
        "architectures": ["BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "embedding_size": 32,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "model_type": "bert",
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    weights = tiny.random_weights(BertForMaskedLM, BertConfig(**settings))
    return {
        "README.md": PAGE,
        "config.json": as_json(settings),
        "flax_model.msgpack": b"\0" * 64,
        "pytorch_model.bin": tiny.pickled(weights | {"bert.embeddings.position_ids": torch.arange(128)[None]}),
        "special_tokens_map.json": special_tokens(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]"),
        "tf_model.h5": b"\0" * 64,
        "tokenizer_config.json": _muril_tokenizer(),
        "vocab.txt": tiny.vocabulary_file(tokenizer),
    }


@cache
def mahabert() -> Files:
    """MahaBERT v2 of L3Cube: MuRIL's files and those that a later transformers adds; weights in both forms."""
    name, files = "l3cube-pune/marathi-bert-v2", dict(muril())
    tokenizer = tiny.wordpiece(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), lowercase=False)
    settings = SMALL | {
        "_name_or_path": name,
        "architectures": ["BertForMaskedLM"],
        "classifier_dropout": None,
        "embedding_size": 32,
        "hidden_act": "gelu",
        "model_type": "bert",
        "pad_token_id": 0,
        "use_cache": True,
        "position_embedding_type": "absolute",
        "torch_dtype": "float32",
        "transformers_version": "4.21.1",
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    weights = tiny.random_weights(BertForMaskedLM, BertConfig(**settings))
    more = {"tokenizer_class": "BertTokenizer", "do_basic_tokenize": True, "never_split": None, "name_or_path": name}
    files |= {
        "config.json": as_json(settings),
        "model.safetensors": tiny.safe(weights, ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": _muril_tokenizer(**more, special_tokens_map_file="special_tokens_map.json"),
    }
    return {name: content for name, content in files.items() if not name.startswith(("flax", "tf_"))}


@cache
def xlm_r() -> Files:
    """XLM-R base: `sentencepiece.bpe.model` with tokenizer.json, positions from 2 on, one token type."""
    from transformers import XLMRobertaTokenizer

    pieces = tiny.sentencepiece_model(300, unk_id=0, bos_id=1, eos_id=2)
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=pieces)
    scores = [(model.id_to_piece(each), model.get_score(each)) for each in range(3, model.get_piece_size())]
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scores, ("<mask>", 0.0)]
    tokenizer = XLMRobertaTokenizer(vocab=vocabulary)
    settings = SMALL | {
        "architectures": ["XLMRobertaForMaskedLM"],
        "model_type": "xlm-roberta",
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 130,
        "type_vocab_size": 1,
        "output_past": True,
        "position_embedding_type": "absolute",
        "hidden_act": "gelu",
        "vocab_size": len(vocabulary),
    }
    weights = tiny.random_weights(XLMRobertaForMaskedLM, XLMRobertaConfig(**settings))
    return {
        "README.md": PAGE,
        "config.json": as_json(settings),
        "model.safetensors": tiny.safe(weights, ("lm_head.decoder.weight", "lm_head.decoder.bias")),
        "onnx/model.onnx": b"\0" * 64,
        "pytorch_model.bin": tiny.pickled(weights),
        "sentencepiece.bpe.model": pieces,
        "tokenizer.json": saved_tokenizer(tokenizer.backend_tokenizer),
        "tokenizer_config.json": as_json({"model_max_length": 128}),
    }


@cache
def modernbert() -> Files:
    """ModernBERT base: byte-level pieces, `cls` and `sep` with other names, no token types."""
    from tokenizers import processors

    specials = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
    tokenizer = tiny.byte_level(specials)
    ids = {name: tokenizer.token_to_id(name) for name in specials}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(n, ids[n]) for n in ("[CLS]", "[SEP]")],
    )
    settings = SMALL | {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        "classifier_pooling": "mean",
        "global_attn_every_n_layers": 3,
        "local_attention": 16,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "position_embedding_type": "absolute",
        "cls_token_id": ids["[CLS]"],
        "sep_token_id": ids["[SEP]"],
        "pad_token_id": ids["[PAD]"],
        "bos_token_id": ids["[CLS]"],
        "eos_token_id": ids["[SEP]"],
        "vocab_size": tokenizer.get_vocab_size(),
        "torch_dtype": "float32",
        "transformers_version": "4.48.0.dev0",
    }
    weights = tiny.random_weights(ModernBertForMaskedLM, ModernBertConfig(**settings))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    return {
        "README.md": PAGE,
        "config.json": as_json(settings),
        "model.safetensors": tiny.safe(weights, ("decoder.weight",)),
        "onnx/model.onnx": b"\0" * 64,
        "pytorch_model.bin": tiny.pickled(weights),
        "special_tokens_map.json": special_tokens(unk="[UNK]", cls="[CLS]", sep="[SEP]", pad="[PAD]", mask="[MASK]"),
        "tokenizer.json": saved_tokenizer(tokenizer),
        "tokenizer_config.json": as_json({**about, "model_max_length": 256, "clean_up_tokenization_spaces": True}),
    }
