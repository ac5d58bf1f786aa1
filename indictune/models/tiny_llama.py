"""The package's own small LLaMA: random weights, and a byte-level tokenizer learned from our tweets and chats."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from indictune.models.tiny_bert import SEED, sample_rows

TEMPLATE = resources.files("indictune").joinpath("data", "chat_templates", "llama3.jinja")

# LLaMA 3's, so that its chat template fits.
BEGIN, END_OF_TEXT, END_OF_TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
SPECIAL_TOKENS = (BEGIN, END_OF_TEXT, END_OF_TURN, "<|start_header_id|>", "<|end_header_id|>", "<|pad|>")
VOCABULARY = 4000
MAX_LENGTH = 512


def sample_texts() -> list[str]:
    """The texts of the built-in training tweets and chats."""
    tweets = [row["text"] for row in sample_rows("train.jsonl")]
    return tweets + [message["content"] for row in sample_rows("chats/train.jsonl") for message in row["messages"]]


def build(texts: Sequence[str], folder: Path | str) -> None:
    """Write a LLaMA of 2 layers with random weights, and a tokenizer learned from `texts`, to `folder`.

    The same texts give the same bytes. The caller's random state does not change.
    """
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # `torch.manual_seed` would also seed the GPUs' generators, which `fork_rng(devices=[])` does not restore.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with LLaMA 3's special tokens and chat template.

    Texts are split at spaces, so an Indic word may become one token: GPT-2's pattern splits it at every vowel sign.
    """
    backend = Tokenizer(BPE())
    at_spaces = pre_tokenizers.Split(" ", "merged_with_next")
    backend.pre_tokenizer = pre_tokenizers.Sequence([at_spaces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=BEGIN,
        eos_token=END_OF_TURN,
        pad_token="<|pad|>",
        additional_special_tokens=["<|start_header_id|>", "<|end_header_id|>", END_OF_TEXT],
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )
