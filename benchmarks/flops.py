"""Floating-point operations that a model needs, and that a device does in a second."""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM


def matmul_flops_per_second(width: int, repeats: int = 20) -> float:
    """FLOP/s of bf16 products [width, width] x [width, width] on the GPU, else on the CPU."""
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
    """FLOPs of training on rows of these lengths: 6 for each token and weight of the encoder, and attention.

    Attention has two products, each once forward and twice backward. Padding does not count.
    """
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in BertModel(config).encoder.parameters())
    attention = 12 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 6 * weights * float(lengths.sum()) + attention


def adapter_flops(config: LlamaConfig, lengths: np.ndarray) -> float:
    """FLOPs of training an adapter: 4 for each token and frozen weight, which has no gradient, and causal attention.

    The adapter and what gradient checkpointing recomputes do not count.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    attention = 6 * config.num_hidden_layers * config.hidden_size * float((lengths**2).sum())
    return 4 * weights * float(lengths.sum()) + attention
