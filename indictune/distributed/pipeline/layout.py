"""Where the models that a pipeline can cut have their layers, and at which layers it cuts them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from indictune.models.own_model import own_model

# An embedding reads a few rows for a micro-batch, but the gradient and the optimizer's step touch all of them.
TABLE = 1 / 8  # cost of its weights, where a weight that multiplies states costs 1


@dataclass(frozen=True)
class Layout:
    """The names of the parts of a base model.

    Attributes:
        entry: makes hidden states of token ids.
        blocks: the list of repeated layers.
        exits: what reads the states of the last layer, in the order in which it does.
    """

    entry: str
    blocks: str
    exits: tuple[str, ...]


_BERT = Layout("embeddings", "encoder.layer", ("pooler",))
_LLAMA = Layout("embed_tokens", "layers", ("norm",))

# tests/distributed/test_pipeline_stages.py compares each with the whole model.
LAYOUTS = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "modernbert": Layout("embeddings", "layers", ("final_norm",)),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def spans(model: nn.Module, stages: int) -> list[range]:
    """The layers of each stage, by number, so that the most expensive stage costs as little as possible.

    Of several such cuts, the one whose first stages have the fewest layers: they keep the most micro-batches.
    """
    own = own_model(model)
    layout, base = LAYOUTS[own.config.model_type], own.base_model
    blocks = [_cost(block) for block in base.get_submodule(layout.blocks)]
    first = _cost(base.get_submodule(layout.entry))
    last = _cost(own) - _cost(base) + sum(_cost(getattr(base, name)) for name in layout.exits if getattr(base, name))
    if is_tied(own):
        last += own.get_output_embeddings().weight.numel()
    return cut(blocks, first, last, stages)


def cut(blocks: Sequence[float], first: float, last: float, stages: int) -> list[range]:
    """Cut layers into runs of at least one, whose largest cost is smallest.

    Args:
        blocks: cost of each layer.
        first: cost of what stands before the layers, in the first stage.
        last: cost of what stands behind them, in the last stage.
        stages: at most as many as there are layers.
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
