"""A script that trains a step of tiny models in stages, by every schedule.

    torchrun --nproc_per_node 4 tests/distributed/pipelining.py bert modernbert llama

Each rank prints a line of JSON for each: how far loss, norm and gradients are from those of the whole model.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import get_total_norm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from indictune.distributed.pipeline.engine import StageGradients
from indictune.distributed.pipeline.layout import SCHEDULES, Action, chunks_of
from indictune.distributed.pipeline.runner import Batch, IdleTime, Runner, StageLinks
from indictune.distributed.pipeline.stages import Stages
from tests.models.tiny import CONFIGS, SMALL

LAYERS = 8
LIKE_LLAMA: dict[str, Any] = {"mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
CAUSAL = ("llama", *LIKE_LLAMA)


def batch(rows: int, tokens: int, number: int) -> Batch:
    """Padded rows of random tokens."""
    generator = torch.Generator().manual_seed(number)
    input_ids = torch.randint(3, 99, (rows, tokens), generator=generator)
    mask = torch.ones_like(input_ids)
    mask[-1, tokens // 2 :] = 0
    return {"input_ids": input_ids * mask, "attention_mask": mask, "labels": input_ids[:, 0] % 3}


BATCHES = [batch(rows, tokens, number) for number, (rows, tokens) in enumerate([(2, 5), (1, 9), (3, 4), (2, 7)])]


def tiny(kind: str) -> PreTrainedModel:
    settings = {**SMALL, "num_hidden_layers": LAYERS, "intermediate_size": 64, "num_key_value_heads": 2}
    config = CONFIGS[kind]() if kind in CONFIGS else LIKE_LLAMA[kind](**settings)
    config.update({"num_hidden_layers": LAYERS, "num_labels": 3, "pad_token_id": 0, "tie_word_embeddings": True})
    config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    if kind == "modernbert":
        config.update({"layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2)})
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM if kind in CAUSAL else AutoModelForSequenceClassification
    model: PreTrainedModel = auto.from_config(config).train()
    return model


def loss_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    """The summed cross-entropy of the rows, or of all tokens and their followers."""

    def loss(inputs: Batch) -> Tensor:
        logits = model(**{name: each for name, each in inputs.items() if name != "labels"}).logits
        if logits.ndim == 3:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
        return functional.cross_entropy(logits, inputs["labels"], reduction="sum")

    return loss


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-12))


def compare(kind: str, schedule: str) -> dict[str, float]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = tiny(kind)
    model = copy.deepcopy(whole)
    expected = sum((loss_of(whole)(each) for each in BATCHES), torch.zeros(()))
    torch.autograd.backward(expected)
    chunks = chunks_of(schedule)
    stages = Stages(model, rank, ranks, chunks)
    links = StageLinks([range(ranks)], chunks > 1)
    runner = Runner(stages, links, schedule, nullcontext, IdleTime(torch.device("cpu")))
    ends = torch.distributed.new_group([0, ranks - 1])
    everyone = torch.distributed.group.WORLD
    assert everyone is not None
    gradients = StageGradients(model, stages, everyone, ends_group=ends)
    total = runner.train(BATCHES, loss_of(model), torch.autograd.backward)
    gradients.sum()
    norm = gradients.clip(0.0)
    of_whole = dict(whole.named_parameters())
    found = [apart(_grad(of_whole[name]), _grad(each)) for name, each in model.named_parameters()]
    measured = runner.measure(BATCHES[0], loss_of(model))
    links.finish()
    with torch.no_grad():
        whole_loss = loss_of(whole)(BATCHES[0])
    return {
        "loss": 0.0 if total is None else apart(expected.detach(), total),
        "grad_norm": apart(get_total_norm([_grad(each) for each in whole.parameters()]), norm),
        "gradients": max(found),
        "parameters": len(found),
        "measured": 0.0 if measured is None else apart(whole_loss, measured),
    }


def other_micro_batch() -> None:
    """The last stage gets the labels of another micro-batch."""
    forward = Runner._forward

    def with_others(self: Runner, action: Action, received: Any, batch: Batch, loss: Any) -> Tensor:
        other = BATCHES[0]["labels"] if action.micro_batch == 3 else batch["labels"]
        return forward(self, action, received, batch | {"labels": other}, loss)

    Runner._forward = with_others  # type: ignore[method-assign]


def unsummed_tied_gradient() -> None:
    """Each end of the pipeline keeps its own gradient of the weight that both have."""
    StageGradients.sum = lambda self: None  # type: ignore[method-assign]


def norm_of_one_stage() -> None:
    """Each rank has the norm of its own stages."""
    StageGradients.clip = lambda self, max_norm: get_total_norm([_grad(each) for each in self.model.parameters()])  # type: ignore[method-assign]


MUTANTS = {each.__name__: each for each in (other_micro_batch, unsummed_tied_gradient, norm_of_one_stage)}


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    if mutant := os.environ.get("MUTANT"):
        MUTANTS[mutant]()
    for kind, schedule in itertools.product(sys.argv[1:], SCHEDULES):
        print(json.dumps({"model": kind, "schedule": schedule, **compare(kind, schedule)}), flush=True)
    torch.distributed.destroy_process_group()
