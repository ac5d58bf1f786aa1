"""Models cut into stages: which layers each gets, and that together they compute what the whole model does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from indictune.data.collation import JoinRows
from indictune.distributed.pipeline.layout import cut
from indictune.distributed.pipeline.runner import Batch
from indictune.distributed.pipeline.stages import Stages
from indictune.models.load import without_adapter
from indictune.models.unpadded import classify_unpadded, read_unpadded
from tests.distributed import pipelining
from tests.distributed.pipelining import CAUSAL, LAYERS, batch, tiny
from tests.ranks.launching import start, torchrun

ROUNDING = 1e-6
JOINED = JoinRows(labels_of_tokens=False)(
    [{"input_ids": list(range(3, 3 + tokens)), "labels": 0, "seq_lengths": [tokens]} for tokens in (5, 9, 3)]
)


def test_equal_layers_are_shared_out_equally() -> None:
    assert cut([1.0] * 6, 0, 0, 3) == [range(2), range(2, 4), range(4, 6)]
    assert cut([1.0] * 4, 0, 0, 4) == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def test_embedding_and_head_count() -> None:
    assert cut([1.0] * 6, first=2, last=0, stages=2) == [range(2), range(2, 6)]
    assert cut([1.0] * 6, first=0, last=2, stages=2) == [range(4), range(4, 6)]
    assert cut([1.0] * 3, first=50, last=0, stages=3) == [range(1), range(1, 2), range(2, 3)]


def logits_and_gradients(models: list[nn.Module], stages: list[Stages], inputs: Batch) -> Tensor:
    """The logits; the gradients of their sum, weighted so that each counts, are in the models."""
    states, passes = None, list[tuple[Tensor | None, Tensor]]()
    count = stages[0].count
    for number in range(count):
        received = None if states is None else states.detach().requires_grad_()
        mine = stages[number % len(stages)]
        if number < count - 1:
            states = mine.states(number, received, inputs)
            passes.append((received, states))
        else:
            mine.show(number, received)
            logits: Tensor = models[-1](**inputs).logits
            passes.append((received, (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum()))
    gradient = None
    for received, result in reversed(passes):
        torch.autograd.backward(result, gradient)
        gradient = None if received is None else received.grad
    for each in stages:
        each.show_all()
    return logits


@pytest.mark.parametrize(
    ("kind", "joined", "adapted", "ranks", "chunks"),
    [
        ("bert", True, False, 3, 1),
        ("xlm-roberta", False, True, 2, 1),
        ("roberta", False, False, 2, 1),
        ("modernbert", True, True, 2, 2),
        ("llama", False, False, 4, 1),  # its head is tied to its embedding
        ("llama", True, True, 2, 2),
        ("mistral", True, False, 2, 1),
        ("qwen2", True, False, 2, 1),
        ("qwen3", True, False, 2, 1),
    ],
)
def test_stages_compute_what_the_whole_model_does(
    kind: str, joined: bool, adapted: bool, ranks: int, chunks: int
) -> None:
    model: nn.Module = tiny(kind)
    if adapted:
        heads = None if kind in CAUSAL else ["classifier"]
        lora = LoraConfig(target_modules="all-linear", modules_to_save=heads, init_lora_weights=False)
        model = get_peft_model(model, lora)
    parts = [copy.deepcopy(model) for _ in range(ranks)]
    stages = [Stages(part, rank, ranks, chunks) for rank, part in enumerate(parts)]
    for each in (model, *parts) if joined else ():
        (read_unpadded if kind in CAUSAL else classify_unpadded)(each)
    inputs = {**(JOINED if joined else batch(3, 9, 0))}
    del inputs["labels"]

    expected = model(**inputs).logits
    torch.autograd.backward((expected * torch.linspace(-1, 1, expected.numel()).view(expected.shape)).sum())
    assert torch.equal(logits_and_gradients(parts, stages, inputs), expected)

    found: dict[str, Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad + found.get(name, 0)
    whole = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == whole.keys()
    apart = {name: float((found[name] - whole[name]).norm() / whole[name].norm().clamp(min=1e-9)) for name in whole}
    assert max(apart.values()) < ROUNDING, apart


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "llama"])
@pytest.mark.parametrize("rank", [0, 1])
def test_stages_checkpoint_activations(kind: str, rank: int) -> None:
    """transformers (5.23) asks for the input embedding, of which the second stage has none."""
    part: Any = tiny(kind)
    Stages(part, rank, 2)
    part.activation_checkpointing_enable()
    assert part.is_gradient_checkpointing


def test_a_rank_drops_the_weights_of_the_others() -> None:
    whole = tiny("bert")
    parts = [tiny("bert") for _ in range(2)]
    for rank, part in enumerate(parts):
        Stages(part, rank, 2)
    names = [{name for name, _ in part.named_parameters()} for part in parts]
    assert names[0] | names[1] == {name for name, _ in whole.named_parameters()}
    assert names[0] & names[1] == set()
    assert len(without_adapter(parts[0]).base_model.encoder.layer) == LAYERS  # layers keep their numbers


def differences(ranks: int, models: list[str], **variables: str) -> list[dict[str, Any]]:
    """What each rank of the script prints."""
    command = [*torchrun(ranks), "tests/distributed/pipelining.py", *models]
    result = start(command, variables, timeout_s=120)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "models"), [(2, ["llama"]), (4, ["bert", "modernbert", "llama"])])
def test_ranks_train_as_one_process(ranks: int, models: list[str]) -> None:
    """By all schedules, on micro-batches of different shapes; of a LLaMA with a tied embedding."""
    lines = differences(ranks, models)
    assert len(lines) == ranks * len(models) * 3
    apart = {(each["model"], each["schedule"], name): each[name] for each in lines for name in ("loss", "grad_norm")}
    assert max(apart.values()) < ROUNDING, apart
    assert max(max(each["gradients"], each["measured"]) for each in lines) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "model", "differs"),
    [
        (pipelining.other_micro_batch, "bert", "gradients"),
        (pipelining.unsummed_tied_gradient, "llama", "gradients"),
        (pipelining.norm_of_one_stage, "llama", "grad_norm"),
    ],
)
def test_the_comparison_sees_a_broken_pipeline(mutant: Callable[[], None], model: str, differs: str) -> None:
    lines = differences(2, [model], MUTANT=mutant.__name__)
    assert max(each[differs] for each in lines) > 1000 * ROUNDING
