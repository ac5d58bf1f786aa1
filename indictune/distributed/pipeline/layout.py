"""Where a pipeline can cut a model into stages, what it cannot run, and the order of its actions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from indictune.config.plan import AnyPlan
from indictune.distributed.strategy import runs_optimizer
from indictune.errors import Problem, problem
from indictune.models.load import has_own_code, without_adapter

GPIPE, ONE_FORWARD_ONE_BACKWARD, INTERLEAVED = SCHEDULES = ("gpipe", "1f1b", "interleaved")
CHUNKS = 2  # stages of one rank under `interleaved`


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    is_forward: bool
    stage: int
    micro_batch: int


def chunks_of(schedule: str) -> int:
    """Stages of one rank. Rank r of p has the stages r, r + p, and so on."""
    return CHUNKS if schedule == INTERLEAVED else 1


def actions(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What one rank computes in a training step, in order.

    GPipe computes all forward passes first, and so keeps the activations of all micro-batches. 1F1B (PipeDream-Flush,
    arXiv:2006.09503) keeps at most as many as there are stages after it. The interleaved schedule (arXiv:2104.04473)
    is 1F1B with two stages a rank: half the bubble for twice the messages. A step has at least one micro-batch.
    """
    chunks = chunks_of(schedule)
    forwards = _passes(True, rank, ranks, micro_batches, chunks)
    backwards = _passes(False, rank, ranks, micro_batches, chunks)
    if schedule == GPIPE:
        return forwards + backwards
    after = ranks - rank - 1
    ahead = after if chunks == 1 else min(len(forwards), 2 * after + (chunks - 1) * ranks)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    ordered = forwards[:ahead] + [each for pair in pairs for each in pair]
    return ordered + backwards[len(forwards) - min(ahead, len(forwards)) :]


def _passes(is_forward: bool, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """All passes of one direction: as many micro-batches as there are ranks pass a chunk before the next chunk."""
    order = range(chunks) if is_forward else reversed(range(chunks))
    groups = [range(first, min(first + ranks, micro_batches)) for first in range(0, micro_batches, ranks)]
    stages = [chunk * ranks + rank for chunk in order]
    return [Action(is_forward, stage, each) for group in groups for stage in stages for each in group]


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of a step in which a rank waits, if all stages take equally long: (p-1) / (m + p-1).

    A step of m micro-batches takes m + p-1 turns, of which each rank works m (Huang et al. 2019, GPipe, section 2).
    With v stages a rank, a turn is a v-th as long: (p-1) / (v m + p-1) (Narayanan et al. 2021, section 2.2.2).
    """
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


# An embedding reads a few rows for a micro-batch, but the gradient and the optimizer's step touch all of them.
TABLE = 1 / 8  # cost of its weights, where a weight that multiplies states costs 1


@dataclass(frozen=True)
class Layout:
    """The names of the parts of a base model."""

    entry: str  # makes hidden states of token ids
    blocks: str  # the list of repeated layers
    exits: tuple[str, ...]  # what reads the states of the last layer, in the order in which it does


# tests/distributed/test_pipeline_stages.py compares each with the whole model.
LAYOUTS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), Layout("embeddings", "encoder.layer", ("pooler",))),
    "modernbert": Layout("embeddings", "layers", ("final_norm",)),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Layout("embed_tokens", "layers", ("norm",))),
}


def spans(model: nn.Module, stages: int) -> list[range]:
    """The layers of each stage, by number, so that the most expensive stage costs as little as possible.

    Of several such cuts, the one whose first stages have the fewest layers: they keep the most micro-batches.
    """
    own = without_adapter(model)
    layout, base = LAYOUTS[own.config.model_type], own.base_model
    blocks = [_cost(block) for block in base.get_submodule(layout.blocks)]
    first = _cost(base.get_submodule(layout.entry))
    last = _cost(own) - _cost(base) + sum(_cost(getattr(base, name)) for name in layout.exits if getattr(base, name))
    if is_tied(own):
        last += own.get_output_embeddings().weight.numel()
    return cut(blocks, first, last, stages)


def cut(blocks: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Cut layers into runs of at least one, whose largest cost is smallest.

    The first stage has the first cost too, of what stands before the layers, and the last stage that of what follows.
    """
    before = [first + each for each in itertools.accumulate(blocks, initial=0.0)]
    before[0], before[-1] = 0.0, before[-1] + last
    # best[end]: the largest cost of the stages up to there, and where each of them ends
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(1, stages + 1):
        ends = range(stage, len(blocks) - (stages - stage) + 1)
        best = {
            end: min(
                (max(cost, before[end] - before[begin]), [*kept, end])
                for begin, (cost, kept) in best.items()
                if begin < end
            )
            for end in ends
        }
    return [range(*each) for each in itertools.pairwise(best[len(blocks)][1])]


def is_tied(own: Any) -> bool:
    """Whether the head of a model has the weight of its input embedding."""
    head = own.get_output_embeddings()
    return head is not None and head.weight is own.get_input_embeddings().weight


def _cost(module: nn.Module) -> float:
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    return sum(each.numel() * (TABLE if id(each) in tables else 1) for each in module.parameters())


def check_pipeline(plan: AnyPlan) -> list[Problem]:
    """Refuse models that cannot be cut into so many stages, and flags that stages do not have."""
    if plan.launch.axes.pipeline == 1:
        return []
    found = _of_model(plan)
    for flag, value, reason in _refused_flags(plan):
        found.append(problem("not-in-a-pipeline", f"--{flag}", str(value).lower(), reason=reason))
    stages, steps = plan.launch.axes.pipeline, plan.derived.get("gradient_accumulation_steps")
    if plan.training.pipeline_schedule == INTERLEAVED and steps is not None and steps % stages:
        sizes = {"stages": stages, "steps": steps}
        found.append(problem("interleaved-micro-batches", "--pipeline_schedule", INTERLEAVED, **sizes))
    return found


def _of_model(plan: AnyPlan) -> list[Problem]:
    config, name = plan.model_config, plan.model.model_name_or_path
    if config is None:
        return []
    if config.model_type not in LAYOUTS or has_own_code(plan.model, config):
        reason = f"Models of type {config.model_type} are not known ({', '.join(LAYOUTS)} are)"
        if config.model_type == "albert":
            reason = "All its layers are one set of weights, which each stage would hold"
        elif config.model_type in LAYOUTS:
            reason = "It has its own code"
        return [problem("model-without-stages", "--model_name_or_path", name, reason=reason)]
    if plan.launch.axes.tensor > 1 and plan.head == "ForCausalLM" and config.tie_word_embeddings:
        reason = "Its head is tied to its embedding, which stages whose matrices are split do not share"
        return [problem("model-without-stages", "--model_name_or_path", name, reason=reason)]
    layers: int = config.num_hidden_layers
    ranks, chunks = plan.launch.axes.pipeline, chunks_of(plan.training.pipeline_schedule)
    if ranks * chunks > layers:
        needed, most = ranks * chunks, layers // chunks
        code, flag = "more-stages-than-layers", "--num_processes"
        return [problem(code, flag, ranks, chunks=chunks, needed=needed, layers=layers, most=most)]
    return []


def _refused_flags(plan: AnyPlan) -> Iterator[tuple[str, object, str]]:
    """Flag, value and reason."""
    training, values, is_sharded = plan.training, plan.configuration, plan.launch.axes.is_sharded
    if training.fp16:
        yield "fp16", True, "all stages would have to agree on the scale of the loss"
    if training.torch_compile:
        yield "torch_compile", True, "a stage runs a part of what is compiled"
    if values.get("activation_offloading"):
        yield "activation_offloading", True, "a stage computes several micro-batches before its backward passes"
    if training.reduce_dtype != "float32":
        yield "reduce_dtype", training.reduce_dtype, "copies of a stage sum their gradients in their own type"
    if "lomo" in str(training.optim):
        yield "optim", training.optim, "it steps in the backward pass, before the norm over all stages is known"
    if is_sharded and training.pipeline_schedule == INTERLEAVED:
        yield "pipeline_schedule", INTERLEAVED, "FSDP2 inside stages takes one stage a process"
    if is_sharded and plan.model.method == "qlora":
        yield "method", "qlora", "FSDP2 inside stages does not split 4-bit weights"
    if is_sharded and not runs_optimizer(replace(plan.launch, strategy="fsdp2"), str(training.optim)):
        yield "optim", training.optim, "FSDP2 inside stages splits its states otherwise"
    for name in {"embed_tokens", "lm_head"} & set(plan.model.modules_to_save):
        yield "modules_to_save", name, "first and last stage may share it"
