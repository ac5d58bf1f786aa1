"""The weights that a rank has before its data axis shards them, and the widths of their model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from indictune.config.plan import Axes
from indictune.distributed.fsdp import repeated_blocks
from indictune.distributed.pipeline.layout import LAYOUTS, is_tied, spans
from indictune.distributed.tensor import styles_of
from indictune.models.config_shapes import MetaModel


@dataclass(frozen=True)
class Weight:
    """A parameter of a rank."""

    shape: tuple[int, ...]  # of the part that the tensor axis leaves to the rank
    is_trained: bool = True  # whether it gets a gradient
    is_packed: bool = False  # whether it is kept in 4 bit
    is_looked_up: bool = False  # whether it is a table that no token is multiplied by
    unit: str = ""  # the repeated layer that has it; empty for a weight outside of them

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    def share(self, shards: int) -> int:
        """Numbers of the largest shard: FSDP2 splits rows."""
        rows, *rest = self.shape or (1,)
        return math.ceil(rows / shards) * math.prod(rest)


class ModelWeights:
    """The weights of a whole model, and those of each rank.

    Attributes:
        counts: of its parameters.
        every: all weights, before anything splits them.
        repeats: how often each layer of weights runs: ALBERT runs one in all its layers.
        multiplied: weights that a token is multiplied by, each as often as it runs.
        multiplied_trained: those of them that get gradients.
        unused: numbers in embedding rows that are saved, and that an active vocabulary does not train.
    """

    def __init__(self, meta: MetaModel) -> None:
        own = self._own = meta.own
        self.counts = meta.counts
        blocks = set(repeated_blocks(own))
        repeated = [(name, each) for name, each in own.named_modules() if type(each).__name__ in blocks]
        units = {id(parameter): name for name, layer in repeated for parameter in layer.parameters()}
        self._all = {
            name: Weight(
                *(tuple(each.shape), each.requires_grad, each in meta.packed, each in meta.looked_up),
                unit=units.get(id(each), ""),
            )
            for name, each in own.named_parameters()
        }
        self.every = list(self._all.values())
        layers: int = own.config.get_text_config().num_hidden_layers
        self.repeats = layers / len(set(units.values()))
        products = [(each, each.numel * (self.repeats if each.unit else 1)) for each in self.every]
        self.multiplied = sum(size for each, size in products if not each.is_looked_up)
        self.multiplied_trained = sum(size for each, size in products if each.is_trained and not each.is_looked_up)
        embedding = cast(nn.Embedding, own.get_input_embeddings())
        rows = own.config.get_text_config().vocab_size - embedding.num_embeddings
        self.unused = max(0, rows) * embedding.embedding_dim

    def of_stages(self, axes: Axes, chunks: int = 1) -> list[list[Weight]]:
        """The weights of a rank of each pipeline stage, before the data axis shards them. A rank has some chunks."""
        styles = styles_of(self._own) if axes.tensor > 1 else {}
        stages = _stages(self._own, axes.pipeline * chunks)
        found: list[list[Weight]] = [[] for _ in range(axes.pipeline)]
        for name, each in self._all.items():
            part = replace(each, shape=_part(each.shape, styles.get(name, ""), axes.tensor))
            for rank in {number % axes.pipeline for number in stages.get(name, {0})}:
                found[rank].append(part)
        return found


def _part(shape: tuple[int, ...], style: str, parts: int) -> tuple[int, ...]:
    """The shape that a style leaves to each of some ranks: columns are the first dimension of a weight in torch."""
    if style.startswith("colwise"):
        return (shape[0] // parts, *shape[1:])
    return (shape[0], shape[1] // parts) if style.startswith("rowwise") and len(shape) == 2 else shape


def _stages(own: PreTrainedModel, count: int) -> dict[str, set[int]]:
    """The stages that hold each parameter, by name; a tied one is in the first and the last. Empty for one stage."""
    if count == 1:
        return {}
    layout, prefix = LAYOUTS[own.config.model_type], own.base_model_prefix
    entry, blocks = f"{prefix}.{layout.entry}.", f"{prefix}.{layout.blocks}."
    of_layer = {number: stage for stage, span in enumerate(spans(own, count)) for number in span}
    found = {}
    for name, _ in own.named_parameters():
        if name.startswith(blocks):
            found[name] = {of_layer[int(name.removeprefix(blocks).partition(".")[0])]}
        elif name.startswith(entry):
            is_shared = is_tied(own) and own.get_submodule(name.rpartition(".")[0]) is own.get_input_embeddings()
            found[name] = {0, count - 1} if is_shared else {0}
        else:
            found[name] = {count - 1}
    return found


@dataclass(frozen=True)
class LayerWidths:
    """What decides the activations of a layer."""

    layers: int
    hidden: int  # values of a token between layers
    inner: int  # values of a token in the feed-forward part
    heads: int  # of the attention
    key_values: int  # values of a token's keys, and again of its values; less than `hidden` with grouped queries
    is_gated: bool  # whether one half of the feed-forward part gates the other


def layer_widths(config: PreTrainedConfig) -> LayerWidths:
    """The widths of a model by its configuration."""
    values = config.get_text_config().to_dict()
    hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    size = int(values.get("head_dim") or hidden // heads)
    groups = int(values.get("num_key_value_heads") or heads)
    # ModernBERT, Gemma, and all that normalise as LLaMA does.
    is_gated = "hidden_activation" in values or values.get("rms_norm_eps") is not None
    inner = int(values.get("intermediate_size") or 4 * hidden)
    return LayerWidths(int(values["num_hidden_layers"]), hidden, inner, heads, size * groups, is_gated)
