"""Cut a model in place into the stages of one rank, and shard them over the ranks that train copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from indictune.distributed.pipeline.layout import LAYOUTS, is_tied, spans
from indictune.models.load import without_adapter


class ReceivedEmbedding(nn.Module):
    """Stands for the embedding in all stages but the first: returns the states that the rank received."""

    def __init__(self, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = tied  # of the head, which the whole model lists under this name
        self.states: Tensor | None = None

    @property
    def word_embeddings(self) -> ReceivedEmbedding:
        """Itself: what encoders give as their input embedding, to activation checkpointing for example."""
        return self

    tok_embeddings = word_embeddings  # of ModernBERT

    def forward(self, *_: Any, **__: Any) -> Tensor:
        assert self.states is not None
        return self.states


class OtherStageModule(nn.Module):
    """Stands for a module of another stage: returns the states that it gets."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        if "attention_type" in vars(replaced):  # ModernBERT asks each layer which mask it needs
            self.attention_type = vars(replaced)["attention_type"]

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        return states


class StageExit(OtherStageModule):
    """Stands for the first layer of the next stage: also keeps the states that this stage has computed."""

    states: Tensor | None = None

    def forward(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        self.states = states
        return states


_NOT_OF_THE_MODEL = ("labels", "windows", "answer_labels", "row_numbers")


class StageBody(nn.Module):
    """The base model as a function that returns the states of a stage. FSDP2 gathers weights for what it returns."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, exit_: StageExit, inputs: Mapping[str, Any]) -> Tensor:
        self.base(**inputs)
        states, exit_.states = exit_.states, None
        assert states is not None
        return states


class Stages:
    """The stages of one rank of a pipeline. The parameters of the other ranks are dropped from the model.

    A stage runs the model's own `forward`, with all inputs of the micro-batch: masks and positions follow from them on
    each rank, and hooks fire as in the whole model. Only the modules of other stages pass on what they get.

    The model is cut in place. A rank has as many stages as chunks.

    Attributes:
        body: computes a stage that is not the last.
        count: of all stages.
        width: of a hidden state.
        dtype: of hidden states.
        is_tied: whether first and last stage have the same weight.
    """

    def __init__(self, model: nn.Module, rank: int, ranks: int, chunks: int = 1) -> None:
        own = self._own = without_adapter(model)
        self._layout, self._base = LAYOUTS[own.config.model_type], own.base_model
        self.body = StageBody(self._base)
        self.rank, self.ranks, self.count = rank, ranks, ranks * chunks
        embedding = own.get_input_embeddings()
        self.width, weight = own.config.hidden_size, embedding.weight
        self.dtype = torch.float32 if weight.requires_grad else weight.dtype  # trainers keep trained weights so
        self._spans = {stage: each for stage, each in enumerate(spans(model, self.count)) if stage % ranks == rank}
        has_first, has_last = 0 in self._spans, self.count - 1 in self._spans
        self.is_tied = is_tied(own)
        self._blocks: nn.ModuleList = self._base.get_submodule(self._layout.blocks)
        self._own_blocks = list(self._blocks)
        self._others = [OtherStageModule(block) for block in self._own_blocks]
        self._exits = {
            stage: StageExit(self._own_blocks[span.stop])
            for stage, span in self._spans.items()
            if self.has_next(stage)
        }
        self._entry = ReceivedEmbedding(embedding.weight if self.is_tied and has_last and not has_first else None)
        self._first = getattr(self._base, self._layout.entry) if has_first else self._entry
        if not has_last:
            self._drop_ends()
        for number in range(len(self._blocks)):
            if not any(number in span for span in self._spans.values()):
                self._own_blocks[number] = self._others[number]
        self.show_all()

    @property
    def tied(self) -> nn.Parameter | None:
        """The weight that first and last stage both have, on their ranks. Sharding replaces it."""
        ends = {0: self._own.get_input_embeddings, self.count - 1: self._own.get_output_embeddings}
        mine = [module for stage, module in ends.items() if stage in self._spans] if self.is_tied else []
        return mine[0]().weight if mine else None

    @property
    def numbers(self) -> list[int]:
        """The stages of this rank, in order."""
        return list(self._spans)

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The layers of this rank."""
        return [self._own_blocks[number] for span in self._spans.values() for number in span]

    def has_next(self, stage: int) -> bool:
        """Whether a stage is not the last one."""
        return stage < self.count - 1

    def show_all(self) -> None:
        """Put all modules of this rank into the model, so that others find its parameters."""
        setattr(self._base, self._layout.entry, self._first)
        self._place(self._own_blocks)

    def states(self, stage: int, received: Tensor | None, inputs: Mapping[str, Any]) -> Tensor:
        """The hidden states that a stage, not the last, gives to the next: [rows, tokens, width].

        It has received those of the stage before; None in the first one. The inputs are those of the whole model.
        """
        self.show(stage, received)
        kept = {name: each for name, each in inputs.items() if name not in _NOT_OF_THE_MODEL}
        states: Tensor = self.body(self._exits[stage], kept)
        self._entry.states = None
        return states.to(self.dtype)  # which the next rank expects

    def show(self, stage: int, received: Tensor | None) -> None:
        """Make the model compute one stage, from the states received, until the next call."""
        self._entry.states = received
        setattr(self._base, self._layout.entry, self._first if stage == 0 else self._entry)
        span, placed = self._spans[stage], list[nn.Module](self._others)
        placed[span.start : span.stop] = self._own_blocks[span.start : span.stop]
        if self.has_next(stage):
            placed[span.stop] = self._exits[stage]
        self._place(placed)

    def _place(self, blocks: list[nn.Module]) -> None:
        for number, block in enumerate(blocks):
            self._blocks[number] = block

    def _drop_ends(self) -> None:
        for name in self._layout.exits:
            if getattr(self._base, name) is not None:
                setattr(self._base, name, OtherStageModule(getattr(self._base, name)))
        for name, child in list(self._own.named_children()):
            if child is not self._base and any(True for _ in child.parameters()):
                setattr(self._own, name, OtherStageModule(child))


def shard(model: nn.Module, stages: Stages, copies: DeviceMesh) -> nn.Module:
    """Shard a rank's only stage in place, over the ranks with the same one: each layer, and the rest as one group.

    Returns:
        What the stage calls, the root of what is sharded.
    """
    for block in stages.own_blocks:
        fully_shard(block, mesh=copies)
    (number,) = stages.numbers
    root = stages.body if stages.has_next(number) else model
    fully_shard(root, mesh=copies)
    return root


def sum_with(root: nn.Module, is_last: bool) -> None:
    """Sum gradients over the copies in the next backward pass, if it is the last one of the step; else keep them."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_is_last_backward(is_last)
