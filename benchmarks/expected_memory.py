"""The memory that the LLaMA recipes need: the lines "Expected memory" of their headers.

    python -m benchmarks.expected_memory            prints them
    python -m benchmarks.expected_memory --write    puts them into the recipes

It counts weights, gradients and optimizer states of the model's shapes, built without data, and the layer inputs that
gradient checkpointing keeps. The active layer, the allocator's gaps and CUDA add some GB, which `benchmarks/gpu.py`
measures on a GPU.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

RECIPES = Path(__file__).parents[1] / "recipes" / "llama"
COMMAND = re.compile(r"accelerate_configs/(\w+)\.yaml(?: --num_processes (\d+))?")
LINES = re.compile(r"^# Expected memory: .*?expected_memory\.py\)$", re.MULTILINE | re.DOTALL)
GB = 1e9

# config.json of meta-llama/Llama-3.1-8B and -70B, and of their Instruct versions.
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}

# Bytes a weight. NF4: half a byte, a byte for the scale of every 64, and 4 for the scale of 256 scales.
FP32, HALF, NF4 = 4.0, 2.0, 0.5 + 1 / 64 + 4 / (64 * 256)
GRADIENT_AND_ADAM, GRADIENT_AND_8_BIT_ADAM = 4.0 + 8.0, 4.0 + 2.0


@dataclass(frozen=True)
class Weights:
    """Numbers of weights.

    Attributes:
        linear: of the layers' matrices, which NF4 quantises and LoRA adapts.
        other: of the embedding, output layer and norms.
        adapter: of LoRA on all linear layers.
    """

    linear: int
    other: int
    adapter: int


def model_of(name: str) -> LlamaForCausalLM:
    """The model without data."""
    shape: dict[str, Any] = dict(zip(SIZES, SHAPES[name.removesuffix("-Instruct").rpartition("-")[2]], strict=True))
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_key_value_heads=8, **shape))


def count(model: LlamaForCausalLM, rank: int) -> Weights:
    """Count a model's weights by kind; `rank` is LoRA's."""
    matrices = [each.weight for each in model.model.modules() if isinstance(each, torch.nn.Linear)]
    linear = sum(matrix.numel() for matrix in matrices)
    total = sum(parameter.numel() for parameter in model.parameters())
    return Weights(linear, total - linear, sum(rank * sum(matrix.shape) for matrix in matrices))


def bytes_of_states(weights: Weights, method: str, strategy: str) -> float:
    """Bytes of weights, gradients and optimizer states, over all processes."""
    whole = weights.linear + weights.other
    if method == "full":
        master = FP32 + (HALF if strategy.startswith("zero") else 0.0)  # DeepSpeed keeps bf16 weights too
        return whole * (master + GRADIENT_AND_ADAM)
    if method == "lora":
        return whole * HALF + weights.adapter * (FP32 + GRADIENT_AND_ADAM)
    states = GRADIENT_AND_ADAM if strategy.startswith("fsdp2") else GRADIENT_AND_8_BIT_ADAM
    return weights.linear * NF4 + weights.other * HALF + weights.adapter * (FP32 + states)


def expected(text: str) -> str:
    """The header lines of a recipe. Its command names the strategy and the number of processes."""
    recipe: dict[str, Any] = yaml.safe_load(text)
    launched = COMMAND.search(text)
    assert launched is not None
    strategy, ranks = launched[1], int(launched[2] or 1)
    model = model_of(recipe["model_name_or_path"])
    weights = count(model, recipe.get("lora_r", 16))
    states = bytes_of_states(weights, recipe["method"], strategy) / GB
    on_cpu = (weights.linear * (NF4 if recipe["method"] == "qlora" else HALF) + weights.other * HALF) / GB
    tokens = recipe["per_device_train_batch_size"] * recipe["max_length"]
    kept = model.config.num_hidden_layers * tokens * model.config.hidden_size * HALF / GB
    if strategy.endswith("_offload"):
        where = f"{states:,.0f} GB of CPU memory over all nodes"
    elif strategy == "ddp" or ranks == 1:
        where = f"{states:.1f} GB on each GPU"
    else:
        where = f"{states / ranks:.1f} GB on each GPU"
    return (
        f"# Expected memory: {where} for weights, gradients and optimizer states,\n"
        f"# {kept:.1f} GB on each GPU for the inputs of the layers. The layer at work comes on top. At the end, when\n"
        f"# the saved model is read again, {on_cpu:.0f} GB of CPU memory on the first node.\n"
        "# (benchmarks/expected_memory.py)"
    )


def main() -> None:
    """Print or write the lines of all recipes."""
    for path in sorted(RECIPES.glob("llama3_*.yaml")):
        text = path.read_text(encoding="utf-8")
        line = expected(text)
        print(f"{path.name}\n{line}\n")
        if "--write" in sys.argv:
            path.write_text(LINES.sub(line, text), encoding="utf-8")


if __name__ == "__main__":
    main()
