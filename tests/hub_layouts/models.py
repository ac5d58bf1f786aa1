"""The tiny models by the name of what they stand for."""

from __future__ import annotations

from collections.abc import Callable

from tests.hub_layouts.decoders import (
    airavata,
    gemma_3,
    indicbert_v3,
    krutrim_2,
    llama_3_2,
    qwen_3,
    sarvam_1,
    sarvam_m,
)
from tests.hub_layouts.encoders import indicbert_v1, indicbert_v2, mahabert, modernbert, muril, xlm_r
from tests.hub_layouts.tiny import Files

ENCODERS: dict[str, Callable[[], Files]] = {
    "ai4bharat/IndicBERTv2-MLM-only": lambda: indicbert_v2()[0],
    "ai4bharat/IndicBERTv2-SS": lambda: indicbert_v2(1)[0],
    "ai4bharat/IndicBERTv2-MLM-Sam-TLM": lambda: indicbert_v2(2)[0],
    "ai4bharat/IndicBERTv2-MLM-Back-TLM": lambda: indicbert_v2(3)[0],
    "ai4bharat/indic-bert": indicbert_v1,
    "google/muril-base-cased": muril,
    "l3cube-pune/marathi-bert-v2": mahabert,
    "FacebookAI/xlm-roberta-base": xlm_r,
    "answerdotai/ModernBERT-base": modernbert,
    "ai4bharat/IndicBERT-v3-270M": indicbert_v3,
}
DECODERS: dict[str, Callable[[], Files]] = {
    "sarvamai/sarvam-1": sarvam_1,
    "sarvamai/sarvam-m": sarvam_m,
    "krutrim-ai-labs/Krutrim-2-instruct": krutrim_2,
    "ai4bharat/Airavata": airavata,
    "meta-llama/Llama-3.2-1B-Instruct": llama_3_2,
    "google/gemma-3-1b-it": gemma_3,
    "Qwen/Qwen3-0.6B": qwen_3,
}
LAYOUTS = {
    "ai4bharat/IndicBERTv2-MLM-only": "only a pickle; padding differs between config.json and tokenizer",
    "ai4bharat/IndicBERTv2-SS": "as MLM-only; knows Devanagari alone",
    "ai4bharat/IndicBERTv2-MLM-Sam-TLM": "as MLM-only",
    "ai4bharat/IndicBERTv2-MLM-Back-TLM": "as MLM-only",
    "ai4bharat/indic-bert": "IndicBERT v1, an ALBERT: an old pickle, `spiece.model` alone",
    "google/muril-base-cased": "only a pickle; `vocab.txt` without tokenizer.json",
    "l3cube-pune/marathi-bert-v2": "MahaBERT: a pickle and safetensors",
    "FacebookAI/xlm-roberta-base": "sentencepiece and tokenizer.json; was renamed",
    "answerdotai/ModernBERT-base": "byte-level pieces, no token types",
    "ai4bharat/IndicBERT-v3-270M": "gated; Gemma 3 with code of its own (`--trust_remote_code true`)",
    "sarvamai/sarvam-1": "two shards; no padding token; was renamed",
    "sarvamai/sarvam-m": "a Mistral whose template thinks; no padding token",
    "krutrim-ai-labs/Krutrim-2-instruct": "a Mistral: pickles in shards only; template of plain words",
    "ai4bharat/Airavata": "no chat template (`--chat_template tulu`)",
    "meta-llama/Llama-3.2-1B-Instruct": "gated, tied; template with the date",
    "google/gemma-3-1b-it": "gated, tied; template that alternates",
    "Qwen/Qwen3-0.6B": "tied; template with thoughts",
}
GATED = ("ai4bharat/IndicBERT-v3-270M", "meta-llama/Llama-3.2-1B-Instruct", "google/gemma-3-1b-it")
RENAMED = {"xlm-roberta-base": "FacebookAI/xlm-roberta-base", "sarvamai/sarvam-0.5": "sarvamai/sarvam-1"}
