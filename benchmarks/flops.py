"""Floating-point operations: those that a model needs, and those that a device does in a second."""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM


def matmul_flops_per_second(width: int, repeats: int = 20) -> float:
    """What products of two bf16 matrices of random numbers, [width, width] each, reach on the GPU, or on the CPU."""
    gpu = torch.cuda.is_available()
    one, other = (torch.randn(width, width, device="cuda" if gpu else "cpu").bfloat16() for _ in range(2))
    since = 0.0
    for repeat in range(-3, repeats):  # three to warm up
        if repeat == 0:
            if gpu:
                torch.cuda.synchronize()
            since = time.perf_counter()
        one @ other
    if gpu:
        torch.cuda.synchronize()
    return 2 * width**3 * repeats / (time.perf_counter() - since)


def classifier_flops(config: BertConfig, lengths: np.ndarray) -> float:
    """Of training on rows of these lengths: 6 for each token and weight of the encoder, and attention.

    Attention multiplies queries with keys and weights with values, each forward once and backward twice. What padding
    costs is no part of it.
    """
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in BertModel(config).encoder.parameters())
    attention = 12 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 6 * weights * float(lengths.sum()) + attention


def adapter_flops(config: LlamaConfig, lengths: np.ndarray) -> float:
    """Of training an adapter on rows of these lengths: 4 for each token and frozen weight, and causal attention.

    Frozen weights have no gradient of their own. The adapter itself, and what gradient checkpointing computes again,
    are no part of it.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 4 * weights * float(lengths.sum()) + attention
